"""Damaged files, each a function of its kind and a seed: `mutated("parquet", 17)`.

Whole files of pyarrow and others are taken apart as far as their format says where things are, one
to three things are changed, and what depends on them (lengths, checksums, offsets) is mostly put
right again, so that a decoder gets past its first check.
"""

from __future__ import annotations

import io
import random
import struct
import tarfile
from dataclasses import dataclass
from functools import cache

import numpy as np
import polars
import pyarrow as pa
import pyarrow.parquet as pq

from tests.data.fuzz import thrift

KINDS = ("parquet", "arrow", "tar")
ROWS = 40
_EDGES = (
    0,
    1,
    -1,
    2,
    7,
    8,
    127,
    128,
    255,
    1 << 15,
    1 << 16,
    1 << 24,
    (1 << 31) - 1,
    -(1 << 31),
    1 << 31,
)
_EDGES += ((1 << 32) - 1, 1 << 32, 1 << 40, 1 << 62, (1 << 63) - 1, -(1 << 63))


@dataclass(frozen=True)
class Damaged:
    """`whole`: nothing was damaged; the file is as a producer would write it."""

    content: bytes
    whole: bool = False


def mutated(kind: str, seed: int) -> Damaged:
    rng = random.Random(f"{kind} {seed}")
    return _MUTATORS[kind](rng)


def _changed_number(rng: random.Random, value: int, size: int = 0) -> int:
    """Edges, and what is near the number itself or the file's size."""
    choice = rng.randrange(8)
    if choice < 3:
        return rng.choice(_EDGES)
    near = (
        value + 1,
        value - 1,
        2 * value,
        value // 2,
        -value,
        value ^ 1 << rng.randrange(40),
        size,
    )
    return near[rng.randrange(len(near))] if choice < 7 else rng.randrange(1 << 12)


def _changed_bytes(rng: random.Random, content: bytes) -> bytes:
    """A few bytes, a range, or a cut; no structure."""
    if not content:
        return b"\x01"
    at, wide = rng.randrange(len(content)), rng.choice((1, 1, 2, 4, 8, 64))
    old = content[at : at + wide]
    new = rng.choice(
        (
            bytes([old[0] ^ 1 << rng.randrange(8)]) + old[1:],
            bytes(len(old)),
            b"\xff" * len(old),
            b"",
            old * 2,
            rng.randbytes(len(old)),
        )
    )
    if rng.randrange(12) == 0:
        return content[:at]
    return content[:at] + new + content[at + wide :]


# ------------------------------------------------------------------------------------ tables


def _table(seed: int) -> pa.Table:
    rng = np.random.default_rng(seed)
    ids = np.arange(ROWS)
    texts = [f"text {i} é" * (i % 3) for i in ids]
    columns: dict[str, pa.Array] = {"id": pa.array(ids), "s": pa.array(texts)}
    if seed % 2 == 0:
        columns["x"] = pa.array(rng.standard_normal(ROWS).astype(np.float32))
        columns["flag"] = pa.array(ids % 3 == 0)
        columns["word"] = pa.array([texts[i % 5] for i in ids]).dictionary_encode()
        columns["maybe"] = pa.array([None if i % 4 == 0 else f"m{i}" for i in ids])
    if seed % 3 == 0:
        columns["tokens"] = pa.array([[int(i)] * (i % 4) for i in ids], pa.list_(pa.int32()))
        columns["pair"] = pa.array([{"a": int(i), "b": float(i)} for i in ids])
        columns["vector"] = pa.array([[float(i), 1.0] for i in ids], pa.list_(pa.float32(), 2))
    if seed % 5 == 0:
        columns["raw"] = pa.array([bytes([i % 256]) * 3 for i in ids], pa.binary(3))
        columns["blob"] = pa.array([bytes([i]) * (i % 7) for i in ids], pa.binary())
    return pa.table(columns)


_PARQUET = (
    {"compression": "none", "use_dictionary": False},
    {"compression": "none", "data_page_version": "2.0"},
    {"compression": "snappy", "row_group_size": 15},
    {
        "compression": "zstd",
        "data_page_version": "2.0",
        "row_group_size": 15,
        "write_page_index": True,
    },
    {"compression": "none", "data_page_size": 64, "write_batch_size": 8, "row_group_size": 15},
    {
        "compression": "none",
        "column_encoding": {"id": "DELTA_BINARY_PACKED", "s": "DELTA_BYTE_ARRAY"},
        "use_dictionary": False,
    },
    {"compression": "lz4", "store_schema": False},
    {"compression": "gzip", "write_page_checksum": True},
)


@cache
def _parquet_base(number: int) -> tuple[bytes, bytes]:
    """What lies before the footer, and the footer."""
    sink = io.BytesIO()
    pq.write_table(_table(number), sink, **_PARQUET[number % len(_PARQUET)])
    content = sink.getvalue()
    length = int.from_bytes(content[-8:-4], "little")
    return content[: -8 - length], content[-8 - length : -8]


def _parquet(rng: random.Random) -> Damaged:
    body, packed = _parquet_base(rng.randrange(30))
    footer, _ = thrift.decode(packed)
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        choice = rng.randrange(10)
        if choice < 5:
            _change_tree(rng, footer, len(body))
        elif choice < 9:
            body = _change_page(rng, body, footer, header=choice < 7)
        else:
            body = _changed_bytes(rng, body)
    packed = thrift.encode(footer)
    length = len(packed)
    if rng.randrange(20) == 0:
        length = _changed_number(rng, length, len(body)) & 0xFFFFFFFF
    if rng.randrange(20) == 0:
        packed = _changed_bytes(rng, packed)
    return Damaged(body + packed + length.to_bytes(4, "little") + b"PAR1")


def _change_tree(rng: random.Random, root: thrift.Node, size: int) -> None:
    node = rng.choice(list(thrift.nodes_of(root)))
    kind, value = node
    if kind in thrift.INTEGERS:
        node[1] = _changed_number(rng, value, size)
    elif kind == thrift.BINARY:
        node[1] = rng.choice(
            (b"", b"\xff\xfe", b"a.b", b"id", value * 2, _changed_bytes(rng, value))
        )
    elif kind in (thrift.TRUE, thrift.FALSE):
        node[0] = thrift.TRUE + thrift.FALSE - kind
    elif kind in (thrift.LIST, thrift.SET) and value[1]:
        nodes, at = value[1], rng.randrange(len(value[1]))
        match rng.randrange(5):
            case 0:
                del nodes[at]
            case 1:
                nodes.insert(at, nodes[rng.randrange(len(nodes))])
            case 2:
                nodes.reverse()
            case 3:
                value[2] = _changed_number(rng, len(nodes)) & 0xFFFFFFFF
            case 4:
                nodes.clear()
    elif kind == thrift.STRUCT and value:
        at = rng.randrange(len(value))
        match rng.randrange(4):
            case 0:
                del value[at]
            case 1:
                value[at][0] = rng.randrange(1, 20)
            case 2:
                value.insert(at, value[rng.randrange(len(value))])
            case 3:
                value[at][1] = [thrift.I64, _changed_number(rng, 1)]


def _change_page(rng: random.Random, body: bytes, footer: thrift.Node, *, header: bool) -> bytes:
    """A page's header or its content. What lies behind it moves, and the footer is told."""
    try:
        pages = list(_pages(body, footer))
    except (IndexError, KeyError, TypeError, ValueError, AttributeError, RecursionError):
        return _changed_bytes(rng, body)  # something else was changed before
    if not pages:
        return body
    start, content, end = rng.choice(pages)
    if header:
        tree, _ = thrift.decode(body, start)
        _change_tree(rng, tree, len(body))
        new = thrift.encode(tree) + body[content:end]
    elif rng.randrange(3) == 0:  # the length of the levels, or the first number of an encoding
        new = (
            body[start:content]
            + struct.pack("<q", _signed(_changed_number(rng, 4), 64))[:4]
            + body[content + 4 : end]
        )
    else:
        new = body[start:content] + _changed_bytes(rng, body[content:end])
    moved = len(new) - (end - start)
    if moved and rng.randrange(4):
        for chunk in _chunks(footer):
            for number, node in chunk[1]:
                if number == 7 and _first(chunk) <= start < _first(chunk) + node[1]:
                    node[1] += moved
            for number, node in chunk[1]:
                if number in (9, 11) and isinstance(node[1], int) and node[1] > start:
                    node[1] += moved
    return body[:start] + new + body[end:]


def _chunks(footer: thrift.Node) -> list[thrift.Node]:
    groups = thrift.field(footer, 4)[1]
    columns = [column for group in groups for column in thrift.field(group, 1)[1]]
    return [[thrift.STRUCT, thrift.field(column, 3)] for column in columns]


def _first(chunk: thrift.Node) -> int:
    return int(thrift.field(chunk, 11) or thrift.field(chunk, 9))


def _pages(body: bytes, footer: thrift.Node):
    """(start, content, end) of each."""
    for chunk in _chunks(footer):
        at = _first(chunk)
        upto = min(at + thrift.field(chunk, 7), len(body))
        while 0 <= at < upto:
            header, content = thrift.decode(body, at)
            end = content + thrift.field(header, 3)
            if not content <= end <= upto:
                break
            yield at, content, end
            at = end


# ------------------------------------------------------------------------------------ Arrow


@cache
def _arrow_base(number: int) -> bytes:
    table, sink = _table(number), io.BytesIO()
    if number % 7 == 6:
        frame = polars.from_arrow(table)
        assert isinstance(frame, polars.DataFrame)
        frame.write_ipc(sink)
        return sink.getvalue()
    options = pa.ipc.IpcWriteOptions(compression=(None, None, None, "zstd", "lz4")[number % 5])
    make = pa.ipc.new_stream if number % 2 else pa.ipc.new_file
    with make(sink, table.schema, options=options) as writer:
        writer.write_table(table, max_chunksize=15)
    return sink.getvalue()


def _arrow(rng: random.Random) -> Damaged:
    content = bytearray(_arrow_base(rng.randrange(30)))
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        regions = _arrow_regions(content)
        choice = rng.randrange(10)
        if choice < 8:  # flatbuffers: offsets, lengths, counts and kinds are aligned numbers
            start, end = rng.choice(regions)
            _change_word(rng, content, start, end)
        elif choice == 8:
            _change_word(rng, content, 0, len(content))
        else:
            content = bytearray(_changed_bytes(rng, bytes(content)))
    return Damaged(bytes(content))


def _arrow_regions(content: bytearray) -> list[tuple[int, int]]:
    """Return the regions of metadata: each message's and the footer's."""
    found = []
    at = content.find(b"\xff\xff\xff\xff")
    while 0 <= at < len(content) - 8:
        length = int.from_bytes(content[at + 4 : at + 8], "little")
        if 0 < length < 1 << 16:
            found.append((at, min(at + 8 + length, len(content))))
        at = content.find(b"\xff\xff\xff\xff", at + 8)
    if content[-6:] == b"ARROW1":
        length = int.from_bytes(content[-10:-6], "little")
        found.append((max(0, len(content) - 10 - length), len(content) - 6))
    return found or [(0, len(content))]


def _change_word(rng: random.Random, content: bytearray, start: int, end: int) -> None:
    wide = rng.choice((1, 2, 4, 4, 8, 8))
    places = range(start, end - wide + 1, min(wide, 4))
    if not places:
        return
    at = rng.choice(places)
    old = int.from_bytes(content[at : at + wide], "little", signed=True)
    new = _changed_number(rng, old, len(content))
    content[at : at + wide] = (new & (1 << 8 * wide) - 1).to_bytes(wide, "little")


def _signed(number: int, bits: int) -> int:
    number &= (1 << bits) - 1
    return number - (1 << bits) if number >> bits - 1 else number


# ------------------------------------------------------------------------------------ tar

_TAR_FIELDS = {
    "name": (0, 100),
    "mode": (100, 8),
    "size": (124, 12),
    "mtime": (136, 12),
    "check": (148, 8),
    "type": (156, 1),
    "link": (157, 100),
    "magic": (257, 8),
    "prefix": (345, 155),
}
_TYPES = b"\0" + b"0123456757SLKxgDNVM"
_NAMES = (
    "{i}.txt",
    "{i}.cls",
    "{i}.json",
    "a/{i}.bin",
    "{i}",
    ".{i}.txt",
    "LICENSE",
    "./{i}.npy",
    "{i}.a.b",
    "é{i}.txt",
    "0.txt",
    "{i}.TXT",
    "a/b/" + "l" * 120 + "{i}.txt",
    "x" * 300 + "{i}.txt",
    "__key__",
    "{i}.__key__",
    "{i}.",
    "d/",
)
_CONTENTS = (
    b"",
    b"1",
    b"text",
    b"{}",
    b"7\n",
    b"\xff",
    b"x" * 600,
    b"y" * 512,
    b"-1",
    b"1_000",
    b"9" * 5000,
)


def _tar(rng: random.Random) -> Damaged:
    """A sixth is whole: samples of txt, cls and bin with keys that differ."""
    sink = io.BytesIO()
    form = rng.choice((tarfile.USTAR_FORMAT, tarfile.PAX_FORMAT, tarfile.GNU_FORMAT))
    whole = rng.randrange(6) == 0
    with tarfile.open(fileobj=sink, mode="w", format=form) as tar:
        for i in range(rng.randrange(1, 12)):
            names = (
                ["{i}.txt", "{i}.cls", "{i}.bin"]
                if whole
                else rng.sample(_NAMES, rng.randrange(1, 4))
            )
            for name in names:
                content = (
                    b"3"
                    if name == "{i}.cls"
                    else rng.choice(_CONTENTS if not whole else (b"", b"1", b"abc", b"x" * 600))
                )
                _add_member(rng, tar, name.format(i=i), content, plain=whole)
    content = sink.getvalue()
    if whole:
        return Damaged(content, whole=True)
    for _ in range(rng.choice((1, 1, 2, 3))):
        content = _change_tar(rng, content)
    return Damaged(content)


def _add_member(
    rng: random.Random, tar: tarfile.TarFile, name: str, content: bytes, *, plain: bool
) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(content)
    if not plain and rng.randrange(10) == 0:
        member.type = rng.choice(
            (tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.DIRTYPE, tarfile.FIFOTYPE)
        )
        member.size, member.linkname = 0, "0.txt"
    if not plain and tar.format == tarfile.PAX_FORMAT and rng.randrange(4) == 0:
        member.pax_headers = {
            rng.choice(
                ("path", "size", "comment", "GNU.sparse.major", "GNU.sparse.map", "hdrcharset")
            ): rng.choice(("1", "x" * 200, "-1", "é", "99999999999", "BINARY", "0,1"))
        }
    try:
        tar.addfile(member, io.BytesIO(content))
    except ValueError:  # a name that this format of tar cannot hold
        return


def _change_tar(rng: random.Random, content: bytes) -> bytes:
    headers = [
        at for at in range(0, len(content) - 511, 512) if content[at + 257 : at + 262] == b"ustar"
    ]
    choice = rng.randrange(10)
    if not headers or choice == 0:
        return _changed_bytes(rng, content)
    at = rng.choice(headers)
    if choice == 1:  # cut off, in the middle or at a block's end
        return content[: rng.choice((at, at + 256, at + 512))]
    if choice == 2:  # a block more or less
        return (
            content[:at]
            + rng.choice((b"", bytes(512), bytes(1024), content[at : at + 512] * 2))
            + content[at + 512 :]
        )
    header = bytearray(content[at : at + 512])
    name = rng.choice(list(_TAR_FIELDS))
    start, wide = _TAR_FIELDS[name]
    header[start : start + wide] = _tar_value(rng, name, wide, bytes(header[start : start + wide]))
    if rng.randrange(5):
        header[148:156] = b" " * 8
        header[148:156] = b"%06o\0 " % sum(header)
    return content[:at] + bytes(header) + content[at + 512 :]


def _tar_value(rng: random.Random, name: str, wide: int, old: bytes) -> bytes:
    if name == "type":
        return bytes([rng.choice(_TYPES)])
    if name in ("size", "mtime", "mode") and rng.randrange(3):
        number = _changed_number(rng, 512)
        text = (
            b"%0*o" % (wide - 1, number)
            if number >= 0
            else b"-%o" % rng.choice((1, 511, 512, 700, 1024))
        )
        sign = b"\x80" if number >= 0 else b"\xff"
        packed = sign + (number & (1 << 8 * wide - 8) - 1).to_bytes(wide - 1, "big")
        return rng.choice((text[-wide:], packed[:wide])).ljust(wide, b"\0")
    return _changed_bytes(rng, old)[:wide].ljust(wide, b"\0")


_MUTATORS = {
    "parquet": _parquet,
    "arrow": _arrow,
    "tar": _tar,
}

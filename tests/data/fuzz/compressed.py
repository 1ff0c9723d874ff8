"""Compressed content, whole or damaged, and what the codec's own library makes of it: Python's gzip
and bz2, and zstandard."""

from __future__ import annotations

import bz2
import gzip
import random
import zlib

import zstandard

CODECS = (".gz", ".gz", ".zst", ".zst", ".bz2")
_SKIPPED_FRAME = b"\x50\x2a\x4d\x18"  # of zstd: its length and content follow
_GZIP_MARK = b"\x1f\x8b"


def compressed(rng: random.Random, content: bytes, codec: str, *, damage: bool) -> bytes:
    parts = [content]
    if rng.randrange(4) == 0:  # as `cat` joins files
        cuts = sorted(rng.randrange(len(content) + 1) for _ in range(rng.randrange(1, 4)))
        parts = [
            content[start:end] for start, end in zip([0, *cuts], [*cuts, len(content)], strict=True)
        ]
    if codec == ".bz2":  # pyarrow refuses an empty stream between others
        parts = [part for part in parts if part] or [b""]
    members = [_MEMBERS[codec](rng, part) for part in parts]
    return _damaged(rng, members, codec) if damage else b"".join(members)


def decompressed(content: bytes, codec: str) -> bytes:
    """Raises if anything is wrong with it."""
    if codec == ".gz":
        return gzip.decompress(content)
    parts = []
    while content:
        if codec == ".zst" and content.startswith(_SKIPPED_FRAME):
            length = int.from_bytes(content[4:8], "little")
            if len(content) < 8 + length:
                raise EOFError("a frame to be skipped is cut off")
            content = content[8 + length :]
            continue
        one = (
            bz2.BZ2Decompressor()
            if codec == ".bz2"
            else zstandard.ZstdDecompressor().decompressobj()
        )
        parts.append(one.decompress(content))
        if not one.eof:
            raise EOFError("the content is cut off")
        content = one.unused_data
    return b"".join(parts)


def _damaged(rng: random.Random, members: list[bytes], codec: str) -> bytes:
    at = rng.randrange(len(members))
    member = members[at]
    match rng.randrange(8):
        case 0:  # cut off, mostly near the end
            near = rng.choice((1, 2, 4, 8, 9, rng.randrange(1, len(member) + 1)))
            return b"".join(members[:at]) + member[: max(0, len(member) - near)]
        case 1:  # what a tape or a block device leaves behind
            return b"".join(members) + bytes(rng.choice((1, 7, 512)))
        case 2:  # something else behind the end
            start = _MEMBERS[codec](rng, b"more")[: rng.randrange(1, 12)]
            return b"".join(members) + rng.choice((b"\n", b"x", b"text\n", _GZIP_MARK, start))
        case 3:  # a member doubled, lost or moved
            return b"".join(rng.choice(members) for _ in range(rng.randrange(1, 4)))
        case 4:  # the trailer: a checksum and a length
            size = min(8, len(member))
            members[at] = member[:-size] + rng.randbytes(size)
        case 5:  # the header: flags, sizes and dictionaries
            members[at] = _changed(rng, member[:16]) + member[16:]
        case 6:
            members[at] = _changed(rng, member)
        case 7:  # content that was not compressed
            members[at] = rng.choice((b"c0\n1\n", b'{"n": 1}\n', b"", b"\n"))
    return b"".join(members)


def _changed(rng: random.Random, content: bytes) -> bytes:
    if not content:
        return b"\x01"
    at = rng.randrange(len(content))
    new = rng.choice((bytes([content[at] ^ 1 << rng.randrange(8)]), b"", b"\0", b"\xff", b"\1\2"))
    return content[:at] + new + content[at + 1 :]


def _gzip_member(rng: random.Random, content: bytes) -> bytes:
    flags, more = 0, b""
    if rng.randrange(4) == 0:  # a name, as `gzip` writes it
        flags, more = 8, b"a.csv\0"
    elif rng.randrange(12) == 0:  # an extra field and a comment, as bgzip and others do
        flags, more = 4 | 16, b"\x06\0BC\x02\0\x1b\0comment\0"
    packer = zlib.compressobj(rng.choice((0, 1, 6, 9)), zlib.DEFLATED, -15)
    body = packer.compress(content)
    if rng.randrange(3) == 0:
        body += packer.flush(zlib.Z_FULL_FLUSH)
    body += packer.flush()
    trailer = zlib.crc32(content).to_bytes(4, "little") + len(content).to_bytes(4, "little")
    return _GZIP_MARK + bytes([8, flags, 0, 0, 0, 0, 0, 255]) + more + body + trailer


def _zstd_frame(rng: random.Random, content: bytes) -> bytes:
    frame = zstandard.ZstdCompressor(
        level=rng.choice((1, 3, 19)),
        write_checksum=rng.randrange(2) == 0,
        write_content_size=rng.randrange(2) == 0,
    ).compress(content)
    if rng.randrange(8) == 0:
        frame = _SKIPPED_FRAME + (3).to_bytes(4, "little") + b"abc" + frame
    return frame


def _bz2_stream(rng: random.Random, content: bytes) -> bytes:
    return bz2.compress(content, rng.choice((1, 9)))


_MEMBERS = {".gz": _gzip_member, ".zst": _zstd_frame, ".bz2": _bz2_stream}

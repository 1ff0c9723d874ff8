"""What changed bytes did once, one small file each: content that a decoder takes, or that ended the
process. Footers that are encrypted, and the child process that reads footers."""

import base64
import io
import json
import os
import signal
import subprocess
import sys
import tarfile

import pyarrow as pa
import pyarrow.parquet as pq
import pyarrow.parquet.encryption as crypto
import pytest

from elastic_dp.config import DataConfig
from elastic_dp.data import read_index
from elastic_dp.data.formats import parquet_footer
from elastic_dp.data.formats.file_format import ShardAt
from elastic_dp.data.formats.parquet import Parquet
from elastic_dp.dataprep import convert
from elastic_dp.errors import BadShard, DataError
from elastic_dp.storage import ObjectRewritten, Store
from tests.data import thrift
from tests.data.shards import add, config, opened, refused, rows_of, write_arrow
from tests.data.values import in_place


def spoilt_footer(path, field, change):
    """`change` the metadata of the first column chunk; `field` of it must be there."""
    sink = io.BytesIO()
    pq.write_table(pa.table({"x": pa.array([1.5, None, 2.5])}), sink)
    content = sink.getvalue()
    length = int.from_bytes(content[-8:-4], "little")
    footer, _ = thrift.decode(content[-8 - length : -8])
    group = thrift.field(footer, 4)[1][0]
    chunk = [thrift.STRUCT, thrift.field(thrift.field(group, 1)[1][0], 3)]
    node = next(node for number, node in chunk[1] if number == field)
    change(node)
    packed = thrift.encode(footer)
    end = len(packed).to_bytes(4, "little") + b"PAR1"
    path.write_bytes(content[: -8 - length] + packed + end)


def one_count_more(sizes):
    thrift.field(sizes, 3)[1].append([thrift.I64, 1])


def short_bound(statistics):
    next(node for number, node in statistics[1] if number == 5)[1] = b"\0"


def put(value):
    return lambda node: node.__setitem__(1, value)


CONTRADICTIONS = (
    (16, one_count_more, "Definition level histogram size mismatch"),
    (12, short_bound, "column 'x' of row group 0: Unexpected end of stream"),
    (4, put(-7), "Unsupported compression codec value"),
    (5, put(-3), "-3 values for 3 rows"),
    (5, put(2), "2 values for 3 rows"),
)


@pytest.mark.parametrize(("field", "change", "words"), CONTRADICTIONS)
def test_parquet_footer_that_contradicts_itself_is_refused_and_ends_no_process(
    field, change, words, tmp_path
):
    spoilt_footer(tmp_path / "a.parquet", field, change)
    refused(config(tmp_path), rf"a\.parquet.*{words}")


def not_utf8():
    offsets = pa.array([0, 2, 4], pa.int32()).buffers()[1]
    return pa.StringArray.from_buffers(2, offsets, pa.py_buffer(b"ok\xff\xfe"))


@pytest.mark.parametrize("nested", [False, True])
def test_parquet_text_that_is_not_utf8_is_a_bad_shard(nested, tmp_path):
    column = pa.StructArray.from_arrays([not_utf8()], ["s"]) if nested else not_utf8()
    pq.write_table(pa.table({"a": column}), tmp_path / "a.parquet", use_dictionary=False)
    groups = opened(config(tmp_path))
    with pytest.raises(BadShard, match="UTF8"):
        groups.read(0)


def test_parquet_page_with_a_value_too_many_does_not_shift_the_rows_of_the_next_row_group(tmp_path):
    """pyarrow reads several row groups as one run of values: convert wrote the rest of the column
    one row late."""
    table = pa.table({"id": list(range(8)), "s": [None, "a", "b", "c", None, "d", "e", "f"]})
    sink = io.BytesIO()
    pq.write_table(table, sink, row_group_size=4, use_dictionary=False, compression="none")
    content = bytearray(sink.getvalue())
    start = pq.read_metadata(sink).row_group(0).column(1).data_page_offset
    header, end = thrift.decode(bytes(content), start)
    page = [thrift.STRUCT, thrift.field(header, 5)]
    values = next(node for number, node in page[1] if number == 1)
    assert values[1] == 4
    values[1] = 5  # the null that fills up its bits
    content[start:end] = thrift.encode(header)
    (tmp_path / "a.parquet").write_bytes(content)
    assert in_place(config(tmp_path))["s"] == table["s"].to_pylist()


def test_arrow_file_whose_footer_has_another_schema_is_refused(tmp_path):
    """Arrow reads it by the footer, and training by its first message: a damaged name was another
    column."""
    batch = pa.record_batch({"name": [1, 2]})
    sink = io.BytesIO()
    with pa.ipc.new_file(sink, batch.schema) as writer:
        writer.write_batch(batch)
    (tmp_path / "a.arrow").write_bytes(sink.getvalue().replace(b"name", b"mame", 1))
    refused(config(tmp_path), r"a\.arrow.*different schemas")


def test_sparse_tar_member_is_refused(tmp_path):
    """tarfile makes zeros of the holes; what lies in the tar is something else."""
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        add(tar, "1.bin", b"1234", type=tarfile.GNUTYPE_SPARSE)
    refused(config(tmp_path), r"1\.bin is a sparse member")


def test_tar_member_that_ends_as_the_key_is_named_is_refused(tmp_path):
    """The member's content became the sample's key, and two samples became one."""
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        for name in ("1.__key__", "1.txt"):
            add(tar, name, b"7")
    refused(config(tmp_path), r"1\.__key__ has the ending '__key__'")


@pytest.mark.parametrize(
    "size", [b"-1", b"-1000", b"\xff" * 11 + b"\0"], ids=["small", "back", "binary"]
)
def test_tar_member_of_a_size_below_zero_is_refused(size, tmp_path):
    """The member was an empty value, or was read again forever."""
    member = tarfile.TarInfo("0.txt")
    header = bytearray(member.tobuf())
    header[124:136] = size.ljust(12, b"\0")
    header[148:156] = b" " * 8
    header[148:156] = b"%06o\0 " % sum(header)
    (tmp_path / "a.tar").write_bytes(bytes(header) + bytes(2048))
    refused(config(tmp_path), r"a\.tar.*0\.txt has the size -")


def test_tar_that_ends_behind_a_member_is_refused(tmp_path):
    """One that was cut off there has fewer samples, and nothing else tells."""
    sink = io.BytesIO()
    with tarfile.open(fileobj=sink, mode="w") as tar:
        for number in range(3):
            add(tar, f"{number}.cls", b"1")
    (tmp_path / "a.tar").write_bytes(sink.getvalue())
    assert read_index(config(tmp_path)).num_rows == 3
    (tmp_path / "a.tar").write_bytes(sink.getvalue()[: 2 * 1024])
    refused(config(tmp_path), r"a\.tar.*ends behind 1\.cls without a tar's end mark.*append 1,024")
    with (tmp_path / "a.tar").open("ab") as file:
        file.write(bytes(1024))
    assert read_index(config(tmp_path)).num_rows == 2


def printed_by(script, folder):
    """In a process of its own, as that may be ended."""
    command = [sys.executable, "-c", script, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


REPEATED = """
import resource, sys
from elastic_dp.config import DataConfig
from elastic_dp.errors import BadShard, DataError
from tests.data.values import in_place

held = 6 << 30
resource.setrlimit(resource.RLIMIT_AS, (held, held))
try:
    in_place(DataConfig(sys.argv[1], micro_batch_size=1, max_bad_fraction=0.01))
except DataError as error:
    print(type(error).__name__, error)
"""


@pytest.mark.parametrize("ending", ["parquet", "arrow"])
def test_row_group_that_is_larger_than_the_memory_is_no_bad_shard(ending, tmp_path):
    """Whether it is skipped would depend on the machine. 100 kB on disk are 10 GB in memory."""
    places = pa.array([0] * 100_000, pa.int32())
    text = pa.DictionaryArray.from_arrays(places, pa.array(["x" * 100_000]))
    table = pa.table({"text": text})
    if ending == "parquet":
        pq.write_table(table, tmp_path / "0.parquet")
    else:
        write_arrow(tmp_path / "0.arrow", table, chunk=100_000)
    said = printed_by(REPEATED, tmp_path)
    assert said.startswith("DataError row group 0 of 0."), said
    assert "does not fit into the memory" in said
    assert "smaller row groups" in said


VIEWS_OF_NULLS = """
import json, sys
import numpy as np
import pyarrow as pa
from elastic_dp.config import DataConfig
from tests.data.values import in_place

def spoilt(array):  # its nulls have views of a negative length
    validity, views, *content = array.buffers()
    ints = np.frombuffer(views, np.int32).reshape(-1, 4).copy()
    ints[[i for i, value in enumerate(array.to_pylist()) if value is None]] = -1 << 31
    return pa.Array.from_buffers(array.type, len(array), [validity, pa.py_buffer(ints), *content])

words = ["a", None, "b" * 30, "c"]
flat = spoilt(pa.array(words, pa.string_view()))
twice = pa.concat_arrays([flat, flat])
two = pa.list_(pa.string_view(), 2)
table = pa.table({
    "s": flat,
    "b": spoilt(pa.array([b"x", None, b"y" * 30, b""], pa.binary_view())),
    "d": pa.DictionaryArray.from_arrays(pa.array([0, 1, 2, 3], pa.int8()), flat),
    "g": pa.StructArray.from_arrays([flat], names=["s"]),
    "l": pa.ListArray.from_arrays([0, 1, 3, 3, 4], flat),
    "f": pa.Array.from_buffers(two, 4, [None], children=[twice]),
})
with pa.ipc.new_file(sys.argv[1] + "/a.arrow", table.schema) as writer:
    writer.write_table(table)
read = in_place(DataConfig(sys.argv[1] + "/a.arrow", micro_batch_size=1))
read["b"] = [None if v is None else v.decode() for v in read["b"]]
print(json.dumps([read]))
"""


def test_arrow_whose_nulls_have_views_of_a_negative_length_is_read(tmp_path):
    """Arrow leaves open what the view of a null holds. In another process, which pyarrow ended."""
    words = ["a", None, "b" * 30, "c"]
    for found in json.loads(printed_by(VIEWS_OF_NULLS, tmp_path)):
        assert found == {
            "s": words,
            "b": ["x", None, "y" * 30, ""],
            "d": words,
            "g.s": words,
            "l": [["a"], [None, "b" * 30], [], ["c"]],
            "f": [["a", None], ["b" * 30, "c"]] * 2,
        }


ROWS = pa.table({"x": [1, 2, 3], "y": ["a", "b", "c"], "at": [{"lat": 1.5, "lon": 2.5}] * 3})


class InMemoryKms(crypto.KmsClient):
    """A KMS as in Arrow's documentation of encryption: keys are wrapped by putting the master key
    in front of them."""

    def __init__(self, connection):
        super().__init__()
        self.master_keys = connection.custom_kms_conf

    def wrap_key(self, key, master_key):
        return base64.b64encode(self.master_keys[master_key].encode() + key)

    def unwrap_key(self, wrapped, master_key):
        return base64.b64decode(wrapped)[16:]


def write_encrypted(path, column, *, plaintext_footer):
    connection = crypto.KmsConnectionConfig(
        custom_kms_conf={"footer": "0123456789112345", "column": "1234567890123450"}
    )
    wanted = crypto.EncryptionConfiguration(
        footer_key="footer", column_keys={"column": [column]}, plaintext_footer=plaintext_footer
    )
    factory = crypto.CryptoFactory(InMemoryKms)
    properties = factory.file_encryption_properties(connection, wanted)
    with pq.ParquetWriter(path, ROWS.schema, encryption_properties=properties) as writer:
        writer.write_table(ROWS)


ENCRYPTED = (  # the column, whether the footer is not, and what is said
    ("x", False, "a.parquet is encrypted Parquet (its footer too), and there are no keys for it"),
    ("x", True, "column 'x' of a.parquet is encrypted, and there are no keys for it; leave it out"),
    ("at.lon", True, "column 'at.lon' of a.parquet is encrypted, and there are no keys for it"),
)


@pytest.mark.parametrize(("column", "plaintext_footer", "said"), ENCRYPTED)
def test_encrypted_parquet_is_refused_and_the_process_goes_on(
    column, plaintext_footer, said, tmp_path
):
    write_encrypted(tmp_path / "a.parquet", column, plaintext_footer=plaintext_footer)
    for read in (
        lambda: read_index(DataConfig(str(tmp_path), micro_batch_size=1)),
        lambda: convert(str(tmp_path), str(tmp_path / "out")),
    ):
        with pytest.raises(DataError) as caught:
            read()
        assert said in str(caught.value)


def test_columns_that_are_not_encrypted_are_read(tmp_path):
    write_encrypted(tmp_path / "a.parquet", "x", plaintext_footer=True)
    rows, _ = rows_of(tmp_path, columns=["y", "at.lat"])
    assert rows == [{"y": letter, "at.lat": 1.5} for letter in "abc"]
    assert convert(str(tmp_path), str(tmp_path / "out"), columns=["y", "at"]).rows == 3


@pytest.fixture
def footers(monkeypatch):
    """A child of this test's own."""
    own = parquet_footer.FooterProcess()
    monkeypatch.setattr("elastic_dp.data.formats.parquet.FOOTERS", own)
    yield own
    own.close()


@pytest.fixture
def shard(tmp_path):
    pq.write_table(pa.table({"t": [[1, 2], [3]], "x": [1, 2]}), tmp_path / "a.parquet")
    return tmp_path / "a.parquet"


@pytest.mark.parametrize("is_killed", [True, False], ids=["killed", "idle"])
def test_a_child_that_is_gone_is_started_again(is_killed, shard, footers, monkeypatch):
    monkeypatch.setattr(parquet_footer, "IDLE_S", 60.0 if is_killed else 0.0)
    config = DataConfig(str(shard), micro_batch_size=1)
    assert read_index(config).num_rows == 2
    first = footers._popen
    if is_killed:
        os.kill(first.pid, signal.SIGKILL)
    first.wait()
    assert read_index(config).num_rows == 2
    assert footers._popen is not first


def test_a_child_that_cannot_start_is_an_error_that_says_why(shard, footers, monkeypatch):
    monkeypatch.setattr(parquet_footer.sys, "executable", "/bin/false")
    with pytest.raises(DataError, match=r"a\.parquet.*exit code 1"):
        read_index(DataConfig(str(shard), micro_batch_size=1))


def test_a_footer_that_is_read_again_must_be_the_one_of_the_index(shard, footers):
    store, size = Store(str(shard.parent)), len(shard.read_bytes())
    other = ShardAt(store, str(shard), size, "", "a.parquet", check=1, tail=100)
    with pytest.raises(ObjectRewritten):
        Parquet().list_values(other, "t")


def flipped(path, first, every):
    """(footers that are read, footers that are refused) with one bit flipped."""
    pq.write_table(ROWS.append_column("l", [[[1], [], [2, 3]]]), path, store_schema=False)
    content = path.read_bytes()
    length = int.from_bytes(content[-8:-4], "little")
    read = refused = 0
    for bit in range(first, 8 * length, every):
        spoilt = bytearray(content)
        spoilt[len(content) - 8 - length + bit // 8] ^= 1 << bit % 8
        path.write_bytes(spoilt)
        try:
            read_index(DataConfig(str(path), micro_batch_size=1))
            read += 1
        except DataError:
            refused += 1
    return read, refused


@pytest.mark.parametrize(("first", "every"), [(3, 61), pytest.param(0, 1, marks=pytest.mark.slow)])
def test_a_footer_with_a_bit_flipped_is_read_or_refused(first, every, tmp_path):
    assert all(flipped(tmp_path / "a.parquet", first, every))

"""Encrypted Parquet is refused by name, and never ends the process."""

import base64
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pyarrow.parquet.encryption as crypto
import pytest

from elastic_dp.dataprep import convert
from elastic_dp.errors import DataError
from tests.data.shards import rows_of

ROWS = pa.table({"x": [1, 2, 3], "y": ["a", "b", "c"], "at": [{"lat": 1.5, "lon": 2.5}] * 3})
# Each of these once ended the process, so it runs in one of its own, and says what it raised.
READ = """
import sys
from elastic_dp.data import read_index
from elastic_dp.errors import DataError
from elastic_dp.config import DataConfig
for url in sys.argv[1:]:
    try:
        read_index(DataConfig(url, micro_batch_size=1))
    except DataError as error:
        print(error, flush=True)
    else:
        print("read", flush=True)
"""


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


def write_encrypted(path: Path, column: str, *, plaintext_footer: bool) -> None:
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


def test_encrypted_parquet_is_refused_and_the_process_goes_on(tmp_path):
    folders = [tmp_path / str(number) for number in range(len(ENCRYPTED))]
    for folder, (column, plaintext_footer, _) in zip(folders, ENCRYPTED, strict=True):
        folder.mkdir()
        write_encrypted(folder / "a.parquet", column, plaintext_footer=plaintext_footer)
    done = subprocess.run(
        [sys.executable, "-c", READ, *map(str, folders)], capture_output=True, text=True
    )
    assert done.returncode == 0, (done.stdout, done.stderr)
    lines = done.stdout.splitlines()
    assert len(lines) == len(ENCRYPTED)
    assert all(said in line for line, (*_, said) in zip(lines, ENCRYPTED, strict=True)), lines
    for number, (folder, (*_, said)) in enumerate(zip(folders, ENCRYPTED, strict=True)):
        with pytest.raises(DataError) as caught:
            convert(str(folder), str(tmp_path / f"out-{number}"))
        assert said in str(caught.value)


def test_columns_that_are_not_encrypted_are_read(tmp_path):
    write_encrypted(tmp_path / "a.parquet", "x", plaintext_footer=True)
    rows, _ = rows_of(tmp_path, columns=["y", "at.lat"])
    assert rows == [{"y": letter, "at.lat": 1.5} for letter in "abc"]
    assert convert(str(tmp_path), str(tmp_path / "out"), columns=["y", "at"]).rows == 3


# Every bit of a footer once: pyarrow ended the process at 1 in 60.
FLIPPED = """
import sys
from elastic_dp.data import read_index
from elastic_dp.errors import DataError
from elastic_dp.config import DataConfig
path = sys.argv[1]
content = open(path, "rb").read()
length = 8 * int.from_bytes(content[-8:-4], "little")
refused = 0
for bit in range(int(sys.argv[2]), length, int(sys.argv[3])):
    flipped, at = bytearray(content), len(content) - 8 - length // 8 + bit // 8
    flipped[at] ^= 1 << bit % 8
    with open(path, "wb") as file:
        file.write(flipped)
    try:
        read_index(DataConfig(path, micro_batch_size=1))
    except DataError:
        refused += 1
print("done" if refused else "no flipped bit was refused")
"""


def bits_flipped(tmp_path: Path, first: int, every: int) -> str:
    pq.write_table(
        ROWS.append_column("l", [[[1], [], [2, 3]]]), tmp_path / "a.parquet", store_schema=False
    )
    arguments = [str(tmp_path / "a.parquet"), str(first), str(every)]
    done = subprocess.run(
        [sys.executable, "-c", FLIPPED, *arguments], capture_output=True, text=True
    )
    return done.stdout + done.stderr


def test_a_footer_with_a_bit_flipped_is_read_or_refused(tmp_path):
    assert bits_flipped(tmp_path, 3, 61) == "done\n"


@pytest.mark.slow
def test_a_footer_with_any_bit_flipped_is_read_or_refused(tmp_path):
    assert bits_flipped(tmp_path, 0, 1) == "done\n"

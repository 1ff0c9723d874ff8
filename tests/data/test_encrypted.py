"""Encrypted Parquet is refused by name, and never ends the process."""

import base64
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pyarrow.parquet.encryption as crypto
import pytest

from elastic_dp.config import DataConfig
from elastic_dp.data import read_index
from elastic_dp.dataprep import convert
from elastic_dp.errors import DataError
from tests.data.shards import rows_of

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


def flipped(path: Path, first: int, every: int) -> tuple[int, int]:
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

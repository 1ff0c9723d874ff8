"""How the CSV files of a data set are written, and how pyarrow parses them."""

from __future__ import annotations

import codecs
from dataclasses import dataclass, replace
from typing import Any

import pyarrow as pa
import pyarrow.csv

from elastic_dp.config.csv_options import CsvOptions
from elastic_dp.data.formats.text import BYTE_ORDER_MARK, with_codecs
from elastic_dp.errors import DataError

_BLOCK_LIMIT = (1 << 31) - 1
# Not "1" and "0": a column of these and "true" would be bools in one row group and numbers in
# another.
_TRUE, _FALSE = ["true", "True", "TRUE"], ["false", "False", "FALSE"]
_TABS = with_codecs(".tsv")
_ASCII = bytes(range(128))


@dataclass(frozen=True)
class Dialect:
    """`is_given`: the options name the delimiter."""

    delimiter: str = ","
    is_given: bool = False
    encoding: str = "utf-8"
    null_values: tuple[str, ...] | None = None

    @classmethod
    def of(cls, name: str, options: CsvOptions) -> Dialect:
        """Return the dialect of the file `name`."""
        by_name = "\t" if name.lower().endswith(_TABS) else ","
        given = options.delimiter
        return cls(given or by_name, given is not None, options.encoding, options.null_values)

    @property
    def separator(self) -> bytes:
        return self.delimiter.encode()

    @property
    def can_be_cut(self) -> bool:
        """Whether row ends are found without decoding: each byte is a character of its own, and
        ASCII is ASCII. Otherwise only the whole file can be decoded."""
        if self.encoding == "utf-8":  # bytes below 128 are never part of a longer character
            return True
        try:
            if _ASCII.decode(self.encoding) != _ASCII.decode():
                return False
        except UnicodeError:
            return False
        return all(_is_character(self.encoding, bytes([byte])) for byte in range(256))

    def of_decoded(self) -> Dialect:
        """The dialect of the content that `utf8` returned."""
        return replace(self, encoding="utf-8")

    def utf8(self, content: bytes, where: str) -> bytes:
        """`content` in UTF-8. `where`: for the error message."""
        if self.encoding == "utf-8":
            return content
        try:
            return content.decode(self.encoding).encode()
        except UnicodeError as error:
            raise DataError(
                f"{where} is not {self.encoding} (csv_options): {error}; name the encoding that "
                "it is written in"
            ) from None

    def parse(
        self,
        content: bytes,
        schema: pa.Schema | None = None,
        names: list[str] | None = None,
        ragged: Any = None,
        *,
        fill_missing: bool = False,
    ) -> pa.Table:
        """Parses UTF-8 in this thread, as one block, so that a row may be of any length. `names`:
        of the columns; None if the header line is part of `content`."""
        if names is not None and content.startswith(BYTE_ORDER_MARK):
            # pyarrow removes one, and this one is part of a value
            content = BYTE_ORDER_MARK + content
        types = {} if schema is None else {field.name: field.type for field in schema}
        words = self.null_values
        nulls = {} if words is None else {"null_values": list(words), "strings_can_be_null": True}
        return pa.csv.read_csv(
            pa.BufferReader(content),
            pa.csv.ReadOptions(
                use_threads=False,
                block_size=min(len(content) + 1, _BLOCK_LIMIT),
                column_names=names,
            ),
            pa.csv.ParseOptions(
                delimiter=self.delimiter, newlines_in_values=True, invalid_row_handler=ragged
            ),
            pa.csv.ConvertOptions(
                column_types=types,
                include_columns=list(types) or None,
                include_missing_columns=fill_missing,
                true_values=_TRUE,
                false_values=_FALSE,
                **nulls,
            ),
        )


def _is_character(encoding: str, byte: bytes) -> bool:
    """Whether the byte is no beginning of a longer character. It may be no character at all."""
    try:
        return bool(codecs.getincrementaldecoder(encoding)().decode(byte))
    except UnicodeError:
        return True

"""Decodes the columns that `DataConfig.decode` names: bytes of files become arrays.

It runs where micro-batches are made ahead of the step: in threads, or in the processes of
`DataConfig.workers`. What an array is depends on the row's bytes alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import pyarrow as pa

from elastic_dp.data.pipeline.audio_decoding import check_audio, clips
from elastic_dp.data.pipeline.image_decoding import check_images, images
from elastic_dp.errors import DataError

Decode = Mapping[str, str | Mapping[str, int]]


def check_decoded(decode: Decode | None, leaves: Iterable[pa.Field]) -> None:
    """Raises DataError if a column that is to be decoded is not there, or not of bytes, or the
    library that decodes it is not installed."""
    types = {leaf.name: leaf.type for leaf in leaves}
    for name, kind in (decode or {}).items():
        if name not in types:
            raise DataError(
                f"DataConfig.decode: the job reads no column {name!r}, only "
                f"{', '.join(map(repr, types))}"
            )
        found, what = types[name], "images" if kind == "rgb" else "audio files"
        if not (pa.types.is_binary(found) or pa.types.is_large_binary(found)):
            raise DataError(
                f"DataConfig.decode: column {name!r} is {found}, and must hold the bytes of {what}"
            )
        if kind == "rgb":
            check_images()
            continue
        check_audio(_rate(kind))
        if kind == "audio" and _rate_column(name) in types:
            raise DataError(
                f"DataConfig.decode makes a column {_rate_column(name)!r} of the sampling rates, "
                "and the shards have one; leave theirs out by DataConfig.columns, or set a rate, "
                f"as in decode={{{name!r}: {{'audio': 16000}}}}"
            )


def decoded(arrays: dict[str, Any], decode: Decode) -> dict[str, Any]:
    """The arrays with decoded columns, and one of the sampling rates beside each that is decoded as
    "audio"."""
    made = dict(arrays)
    for name, kind in decode.items():
        if kind == "rgb":
            made[name] = images(name, arrays[name])
            continue
        made[name], rates = clips(name, arrays[name], _rate(kind))
        if kind == "audio":
            made[_rate_column(name)] = rates
    return made


def is_audio(kind: str | Mapping[str, int] | None) -> bool:
    return kind is not None and kind != "rgb"


def _rate(kind: str | Mapping[str, int]) -> int | None:
    return None if isinstance(kind, str) else kind["audio"]


def _rate_column(name: str) -> str:
    return f"{name}_rate"

"""Decodes audio: the bytes of a file become an array of samples, float32.

soundfile decodes, which ships libsndfile, and soxr resamples; both are imported when they are
needed. libsndfile reads a file that was cut off as a shorter one and says nothing. So a clip that
is shorter than its file says is refused here, and only formats are read that say it.
"""

from __future__ import annotations

import io
import struct
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from elastic_dp.data.pipeline.array_memory import aligned
from elastic_dp.errors import DataError

Clip = npt.NDArray[np.float32]  # [samples], or [channels, samples] of more than one channel

_MAX_SAMPLES = 1 << 31  # of a channel; libsndfile has 2^63 - 1 for "the header does not say"
_UNKNOWN_BYTES = 0x7FFF0000  # in a WAV file that was written to a pipe: this many, or more
_OGG_HEADER = 27  # bytes of the header of a page, before the table of its segments
_FIRST_PAGE, _LAST_PAGE = 2, 4  # flags in the sixth byte of a page


def check_audio(rate: int | None) -> None:
    """Raises DataError if soundfile, or soxr where a rate is set, cannot be imported."""
    _soundfile()
    if rate is not None:
        _soxr()


def clips(
    name: str, contents: list[bytes | None], rate: int | None
) -> tuple[Clip | list[Clip], npt.NDArray[np.int64]]:
    """The clips and their sampling rates [rows]. Clips of one shape are one array [rows, samples]
    or [rows, channels, samples]; others are a list of arrays.

    `rate`: resamples clips of other rates to this one; None: leaves them as they are.
    """
    found = [
        _clip(f"column {name!r}, clip {number + 1} of {len(contents)}", content, rate)
        for number, content in enumerate(contents)
    ]
    arrays = [clip for clip, _ in found]
    rates = np.array([own for _, own in found], dtype=np.int64)
    if len({clip.shape for clip in arrays}) == 1:
        return aligned(np.stack(arrays)), rates
    return [aligned(clip) for clip in arrays], rates


def _clip(where: str, content: bytes | None, rate: int | None) -> tuple[Clip, int]:
    if content is None:
        raise ValueError(f"{where} is null; leave such rows out by DataConfig.filter")
    soundfile = _soundfile()
    try:
        with soundfile.SoundFile(io.BytesIO(content)) as file:
            check = _CHECKS.get(file.format)
            if check is None:
                raise ValueError(
                    f"{where} is {file.format}; WAV, FLAC, Ogg and MP3 are decoded, so write it "
                    "as one of them, or decode it in DataConfig.transform"
                )
            if file.frames > _MAX_SAMPLES:
                raise ValueError(
                    f"{where}: its header does not say how many samples it has, so nobody would "
                    "notice if it were cut off; write it again with its length"
                )
            own_rate, wanted = int(file.samplerate), int(file.frames)
            samples = file.read(dtype="float32", always_2d=True)
    except soundfile.LibsndfileError as error:
        raise ValueError(f"{where} cannot be decoded: {error.error_string}") from error
    if len(samples) < wanted:
        raise ValueError(f"{where} is damaged: {len(samples)} of its {wanted} samples are readable")
    if (reason := check(content)) is not None:
        raise ValueError(f"{where} {reason}")
    if rate is not None and rate != own_rate:
        samples = _resampled(samples, own_rate, rate)
        own_rate = rate
    channels: Clip = samples.T
    return np.ascontiguousarray(channels[0] if len(channels) == 1 else channels), own_rate


def _resampled(samples: Clip, own_rate: int, rate: int) -> Clip:
    """[samples, channels] at `rate`. The whole clip in one call: in pieces, the last bits would
    depend on where it is cut."""
    resampled: Clip = _soxr().resample(samples, own_rate, rate, quality="HQ")
    return resampled


# ------------------------------------------------------------------------------- files cut off


def _nothing(content: bytes) -> None:
    """libsndfile itself notices: a FLAC frame has a checksum, and the header the number of samples;
    of MP3 the header of the encoder has it, if there is one."""


def _wav(content: bytes) -> str | None:
    """The samples are one chunk, which begins with its length."""
    order = ">" if content[:4] == b"RIFX" else "<"
    at = 12
    while at + 8 <= len(content):
        (nbytes,) = struct.unpack_from(order + "I", content, at + 4)
        if content[at : at + 4] == b"data":
            rest = len(content) - at - 8
            if rest < nbytes < _UNKNOWN_BYTES:
                return f"was cut off: it holds {rest:,} of {nbytes:,} bytes of samples"
            return None
        at += 8 + nbytes + nbytes % 2
    return "was cut off: it has no samples"


def _ogg(content: bytes) -> str | None:
    """The last page of a stream has a flag that says so. libsndfile reads the first stream of
    several that were joined."""
    flags = 0
    for start, end in _ogg_pages(content):
        if content[start : start + 4] != b"OggS" or end > len(content):
            return f"was cut off: page at byte {start:,} is incomplete"
        if flags & _LAST_PAGE and content[start + 5] & _FIRST_PAGE:
            return f"is several Ogg streams, joined at byte {start:,}; write them as one"
        flags = content[start + 5]
    return None if flags & _LAST_PAGE else "was cut off: its last page is missing"


def _ogg_pages(content: bytes) -> Iterator[tuple[int, int]]:
    at = 0
    while at < len(content):
        head = at + _OGG_HEADER
        lengths = content[head : head + content[head - 1]] if head <= len(content) else b""
        end = head + len(lengths) + sum(lengths)
        yield at, end
        at = end


_CHECKS = {"WAV": _wav, "WAVEX": _wav, "FLAC": _nothing, "OGG": _ogg, "MP3": _nothing}


def _soundfile() -> Any:
    try:
        import soundfile
    except (ImportError, OSError) as error:  # OSError: without libsndfile
        raise DataError(
            "DataConfig.decode needs soundfile: pip install 'elastic_dp[audio]'"
        ) from error
    return soundfile


def _soxr() -> Any:
    try:
        import soxr
    except ImportError as error:
        raise DataError(
            "DataConfig.decode needs soxr to resample: pip install 'elastic_dp[audio]'"
        ) from error
    return soxr

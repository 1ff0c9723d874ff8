"""Turns the arrays of a micro-batch into the batch that the loop gets: runs the user's `transform`
and `collate_fn`, and makes tensors.

Code that may draw from global generators (`transform(batch)`, `collate_fn`) runs *late*: in the
thread or process whose generators were seeded for this micro-batch. `transform(batch, rng)` and the
conversion to tensors run *early*, in any thread.
"""

from __future__ import annotations

import inspect
import io
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import torch

from elastic_dp.config import DataConfig
from elastic_dp.data.pipeline.array_memory import ALIGNED_TO, aligned, aligned_copy
from elastic_dp.data.pipeline.batch_assembler import pick
from elastic_dp.errors import DataError, ElasticError, SpecError, UserCodeError
from elastic_dp.sampling.seeds import generator_for

_OBJECT_BYTES = 64  # overhead of a Python object


class Collator:
    """Applies the functions of a `DataConfig` to the arrays of a micro-batch. It can be pickled if
    the user's functions can."""

    def __init__(self, config: DataConfig, *, pin: bool = False) -> None:
        self._transform, self._collate_fn = config.transform, config.collate_fn
        self._seed, self._pin = config.seed, pin
        self.runs_early = config.transform is not None and takes_rng(config.transform)
        own_generators = config.transform is None or self.runs_early
        self._decode = dict(config.decode or {})
        self.decodes, self._skips = bool(self._decode), config.max_bad_fraction > 0
        self.all_early = own_generators and config.collate_fn is None
        self.has_user_code = config.transform is not None or config.collate_fn is not None
        # One micro-batch at a time.
        self.makes_alone = self.runs_early or self.decodes

    def decode(self, arrays: dict[str, Any]) -> tuple[dict[str, Any] | None, list[int]]:
        """(the arrays with pixels, the indices of rows that are left out). With max_bad_fraction
        these are the rows that cannot be decoded. The arrays are None if no row is left."""
        if not self._decode:
            return arrays, []
        try:
            return call_user("DataConfig.decode", self._decoded, arrays), []
        except UserCodeError as error:
            if not self._skips or not _is_of_content(error.__cause__):
                raise
        count = len(next(iter(arrays.values())))
        bad = [row for row in range(count) if not self._can_decode(arrays, row)]
        if len(bad) == count:
            return None, bad
        kept = np.delete(np.arange(count), bad)
        rows = {name: pick(column, kept) for name, column in arrays.items()}
        return call_user("DataConfig.decode", self._decoded, rows), bad

    def _can_decode(self, arrays: dict[str, Any], row: int) -> bool:
        one = {name: arrays[name][row : row + 1] for name in self._decode}
        try:
            call_user("DataConfig.decode", self._decoded, one)
        except UserCodeError as error:
            if not _is_of_content(error.__cause__):
                raise
            return False
        return True

    def early(self, arrays: Any, step: int, virtual_worker: int) -> Any:
        if self.runs_early:
            rng = generator_for(self._seed, step, virtual_worker)
            arrays = call_user("DataConfig.transform", self._transform, arrays, rng)
        return self._to_tensors(arrays) if self.all_early else arrays

    def _decoded(self, arrays: dict[str, Any]) -> dict[str, Any]:
        return {**arrays, **{name: images(name, arrays[name]) for name in self._decode}}

    def late(self, arrays: Any) -> Any:
        if self.all_early:
            return arrays
        if self._transform is not None and not self.runs_early:
            arrays = call_user("DataConfig.transform", self._transform, arrays)
        if self._collate_fn is not None:
            return call_user("DataConfig.collate_fn", self._collate_fn, arrays)
        return self._to_tensors(arrays)

    def _to_tensors(self, arrays: Any) -> Any:
        if not isinstance(arrays, dict):
            raise DataError(
                f"DataConfig.transform returned a {type(arrays).__name__}, must return the "
                "dict of arrays; "
                "what makes the micro-batch itself is collate_fn"
            )
        tensors = {name: self._to_tensor(name, value) for name, value in arrays.items()}
        return pinned(tensors) if self._pin else tensors

    def _to_tensor(self, name: str, value: Any) -> Any:
        if _is_list_of_arrays(value):
            value = _stacked(value)
        if isinstance(value, np.ndarray) and value.dtype.kind != "O":
            try:
                if value.flags.carray:  # in order, and to be written to
                    tensor = torch.from_numpy(value)
                    if tensor.data_ptr() % ALIGNED_TO == 0:
                        return tensor
                return torch.from_numpy(aligned_copy(value))
            except (TypeError, ValueError) as error:  # text, times, another order of bytes
                raise DataError(
                    f"DataConfig.transform returned column {name!r} as an array of {value.dtype}, "
                    "which has no tensor; return numbers in the machine's order of bytes, a list, "
                    "or what collate_fn turns into a batch"
                ) from error
        _check_list(name, value)
        return value


def _is_of_content(error: BaseException | None) -> bool:
    """Whether a decoder raised `error` for the bytes, and not for what the machine lacks: whether
    a row is skipped must not depend on the machine."""
    return not isinstance(error, MemoryError) and getattr(error, "errno", None) is None


def takes_rng(transform: Callable[..., Any]) -> bool:
    """Whether it is `transform(batch, rng)` rather than `transform(batch)`."""
    try:
        signature = inspect.signature(transform)
    except (TypeError, ValueError):  # not written in Python
        return False
    for count in (1, 2):
        with suppress(TypeError):
            signature.bind(*range(count))
            return count == 2 or [*signature.parameters][1:2] == ["rng"]
    raise SpecError(
        f"DataConfig.transform takes {signature}, must take (batch), or (batch, rng) with a "
        "NumPy generator"
    )


def call_user(name: str, function: Any, *arguments: Any) -> Any:
    """Calls `function`. Raises UserCodeError, with the traceback, for any exception in it.
    `located` adds the micro-batch later."""
    try:
        return function(*arguments)
    except ElasticError:
        raise
    except Exception as error:  # user code may raise anything
        description = traceback.format_exception_only(error)[-1].strip()
        lines = "".join(traceback.format_exception(error))
        raise UserCodeError("", f"{name} raised {description}", lines) from error


def located(error: UserCodeError, step: int, virtual_worker: int, rows: str) -> UserCodeError:
    """The same error with the micro-batch in its message."""
    where = f"step {step}, virtual worker {virtual_worker}"
    return UserCodeError(where, f"{error.description} on {rows}", error.remote_traceback)


def pinned(batch: Any) -> Any:
    """The batch with all tensors in pinned memory. Looks into dicts, lists and tuples."""
    return _each_tensor(batch, torch.Tensor.pin_memory)


def aligned_tensors(batch: Any) -> Any:
    """The batch with all tensors aligned (see array_memory.py). Looks into dicts, lists and
    tuples."""
    return _each_tensor(batch, _aligned)


def _each_tensor(batch: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    if isinstance(batch, torch.Tensor):
        return change(batch)
    if type(batch) is dict:
        return {key: _each_tensor(value, change) for key, value in batch.items()}
    if type(batch) in (list, tuple):
        return type(batch)(_each_tensor(value, change) for value in batch)
    return batch


def _aligned(tensor: torch.Tensor) -> torch.Tensor:
    unaligned = tensor.layout == torch.strided and tensor.data_ptr() % ALIGNED_TO
    return tensor.clone() if unaligned else tensor


def nbytes_of(batch: Any) -> int:
    """An estimate of the bytes of the arrays, tensors and texts in a batch."""
    if isinstance(batch, torch.Tensor):
        return batch.numel() * batch.element_size()  # of a sparse one, at most
    if isinstance(batch, np.ndarray):
        return batch.nbytes
    if isinstance(batch, str | bytes):
        return _OBJECT_BYTES + len(batch)
    if isinstance(batch, dict):
        return sum(map(nbytes_of, batch.values()))
    if isinstance(batch, list | tuple):
        if isinstance(next(iter(batch), None), int | float):
            return _OBJECT_BYTES * len(batch)
        return sum(map(nbytes_of, batch))
    return _OBJECT_BYTES


def _check_list(name: str, value: Any) -> None:
    """Raises DataError for a list of arrays, which has no tensor."""
    first = value
    while isinstance(first, list) and first:
        first = first[0]
    if isinstance(value, list) and _is_image(first):
        raise DataError(
            f"column {name!r} holds images of different sizes ({first.shape[0]} x "
            f"{first.shape[1]}, …) in one micro-batch; crop or resize them in "
            "DataConfig.transform, or write them in one size"
        )
    if isinstance(value, list) and isinstance(first, np.ndarray):
        raise DataError(
            f"column {name!r} holds lists of different lengths ({len(first)}, …) in one "
            "micro-batch; pad "
            "them in DataConfig.collate_fn, or leave the column out by DataConfig.columns"
        )


def _is_list_of_arrays(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(v) is np.ndarray for v in value)


def _is_image(value: Any) -> bool:
    return isinstance(value, np.ndarray) and value.ndim == 3 and value.dtype == np.uint8


# ------------------------------------------------------------------------------------ images

Pixels = npt.NDArray[np.uint8]
_DEEP = ("I", "F")  # 16 and 32 bits, integers and floats: Pillow would make all above 255 white


def check_decoded(decode: Mapping[str, str] | None, leaves: Iterable[pa.Field]) -> None:
    """Raises DataError if a column that is to be decoded is not there, or not of bytes, or Pillow
    cannot be imported."""
    types = {leaf.name: leaf.type for leaf in leaves}
    for name in decode or ():
        if name not in types:
            raise DataError(
                f"DataConfig.decode: the job reads no column {name!r}, only "
                f"{', '.join(map(repr, types))}"
            )
        found = types[name]
        if not (pa.types.is_binary(found) or pa.types.is_large_binary(found)):
            raise DataError(
                f"DataConfig.decode: column {name!r} is {found}, and must hold the bytes of images"
            )
        _pillow()


def images(name: str, contents: list[bytes | None]) -> Pixels | list[Pixels]:
    """The pixels, uint8 [rows, height, width, 3]; a list of [height, width, 3] if the sizes
    differ."""
    return _stacked([_rgb(name, content) for content in contents])


def _rgb(name: str, content: bytes | None) -> Pixels:
    if content is None:
        raise ValueError(f"column {name!r} is null; leave such rows out by DataConfig.filter")
    with _pillow().open(io.BytesIO(content)) as image:
        if image.mode.startswith(_DEEP):
            raise ValueError(
                f"an image in column {name!r} has pixels of Pillow's mode {image.mode!r}, which "
                "uint8 does not hold; write it with 8 bits a channel, or decode it in transform"
            )
        return np.array(image.convert("RGB"))


def _stacked(arrays: Sequence[Any]) -> Any:
    """One array, if all have one shape."""
    if len({array.shape for array in arrays}) == 1:
        return aligned(np.stack(arrays))
    return [aligned(array) for array in arrays]


def _pillow() -> Any:
    try:
        from PIL import Image
    except ImportError as error:
        raise DataError(
            "DataConfig.decode needs Pillow: pip install 'elastic_dp[images]'"
        ) from error
    return Image

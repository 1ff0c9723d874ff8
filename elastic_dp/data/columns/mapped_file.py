"""Files in mapped memory, whose bytes can also be read straight to where they are wanted.

A read notices a file that was truncated, where touching the mapping would end the process. It costs
no more than the copy does: the kernel takes a fault for each 16 pages of a mapping.
"""

from __future__ import annotations

import os
from typing import Any
from weakref import WeakValueDictionary

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from elastic_dp.errors import StorageError
from elastic_dp.storage import ObjectRewritten

Array = npt.NDArray[Any]
_Stamp = tuple[int, int, int]


class MappedFile:
    """A file, mapped. It keeps no descriptor: there may be thousands of mappings."""

    def __init__(self, path: str) -> None:
        self.path, self.stamp = path, stamp_of(path)
        with pa.memory_map(path) as file:
            self._mapping: pa.Buffer = file.read_buffer()
        _mapped[self._mapping.address] = self

    @property
    def content(self) -> pa.Buffer:
        """The whole file. What is a view of it keeps this mapping, also when the file is
        deleted."""
        return pa.foreign_buffer(self._mapping.address, self._mapping.size, self)

    def read(self, rows: Array, into: Array) -> bool:
        """Reads `rows`, a contiguous view of the content, into a contiguous array of the same
        bytes. Returns False, and has read nothing, if another file or none is at the path now; the
        content is still there then.

        Raises ObjectRewritten if the file was changed since it was mapped.
        """
        try:
            file = open(self.path, "rb", buffering=0)
        except OSError:  # it was deleted, or no descriptor is free
            return False
        left = memoryview(into.reshape(-1).view(np.uint8).data)
        with file:
            if stamp_of(file.fileno())[2] != self.stamp[2]:
                return False
            try:
                file.seek(_address(rows) - self._mapping.address)
                while left and (count := file.readinto(left)):
                    left = left[count:]
            except OSError as error:
                raise StorageError(f"cannot read {self.path}: {error}") from error
            if left or stamp_of(file.fileno()) != self.stamp:
                raise ObjectRewritten(self.path)
        return True


_mapped: WeakValueDictionary[int, MappedFile] = WeakValueDictionary()  # by address


def mapped_file(array: Array) -> MappedFile | None:
    """The file that the array is a view of; None if it is a view of other memory."""
    base: Any = array
    while isinstance(base, np.ndarray):
        base = base.base
    if isinstance(base, memoryview):
        base = base.obj
    if not isinstance(base, pa.Buffer):
        return None
    while (parent := base.parent) is not None:
        base = parent
    return _mapped.get(base.address)


def stamp_of(file: str | int) -> _Stamp:
    """Another file, or one that was written to, has another one. `file`: its path, or a
    descriptor."""
    found = os.stat(file)
    return found.st_mtime_ns, found.st_size, found.st_ino


def _address(array: Array) -> int:
    return int(array.__array_interface__["data"][0])

"""Files in mapped memory, whose bytes can also be read straight to where they are wanted.

For pages of the page cache a read costs less than mapping and copying them, since the kernel maps
16 pages for each fault. It also notices a file that was truncated, where touching the mapping would
end the process.
"""

from __future__ import annotations

import os
from typing import Any
from weakref import WeakValueDictionary

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from elastic_dp.errors import StorageError
from elastic_dp.storage import CachedRange, ObjectRewritten

Array = npt.NDArray[Any]
_Stamp = tuple[int, int, int]


class MappedFile:
    """A file, mapped as `content`, or by this class itself."""

    def __init__(self, path: str, content: CachedRange | None = None) -> None:
        self.path, self.stamp = path, stamp_of(path)
        if content is None:
            with pa.memory_map(path) as file:  # the mapping keeps no descriptor
                self._mapping: pa.Buffer = file.read_buffer()
        else:
            self._mapping = pa.py_buffer(content)
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


def as_mapped(content: Any) -> Any:
    """The same bytes, of which `mapped_file` knows the file if they are in the disk cache."""
    inner = content.obj if isinstance(content, memoryview) else None
    if not isinstance(inner, CachedRange):
        return content
    try:
        return MappedFile(inner.path, inner).content
    except OSError:  # it was deleted
        return content


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

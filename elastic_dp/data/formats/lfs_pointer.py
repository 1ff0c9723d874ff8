"""Pointers of Git LFS: the small text files that a clone has in place of files that were not
downloaded. A pointer with the name of a CSV file would be read as one."""

from __future__ import annotations

from elastic_dp.errors import DataError

POINTER_BYTES = 1024  # limit of a pointer, by the specification of Git LFS
_BEGIN = b"version https://git-lfs.github.com/spec/"


def refuse_pointer(name: str, content: bytes) -> None:
    """Raises DataError if `content` is a pointer. `content`: the first bytes of the file `name`."""
    if len(content) < POINTER_BYTES and content.startswith(_BEGIN):
        raise DataError(
            f"{name} is a pointer of Git LFS ({len(content)} bytes): the clone lacks the file's "
            "content; run `git lfs pull` in it"
        )

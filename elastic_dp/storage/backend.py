"""What a store must be able to do for `Store`: one request each, no retries, foreign exceptions let
through.

A backend is thread safe. It gives up a request in which nothing moves for `stall_s`, where its
library can be told so. Retrying, checking versions and sizes, and naming errors are the façade's,
the same for all backends.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from typing_extensions import Buffer

# obstore's stores by scheme: its name for each, and the extra of this package that installs it
SCHEMES = {
    **{"s3": "s3", "s3a": "s3", "gs": "gs", "gcs": "gs"},
    **{"az": "az", "abfs": "az", "abfss": "az", "http": "http", "https": "http"},
    "memory": "memory",
}
SLOWEST_BYTES_PER_S = 1 << 20  # a slower request is given up, however steadily it moves


def without_weakness(tag: str) -> str:
    """The same tag for every answer about one version of an object. A proxy that compresses some
    answers marks the ETags of these as weak (W/"..."); the listing has the store's own."""
    return tag.removeprefix("W/")


class Entry(NamedTuple):
    """An object. `path`: as the store's methods take it. `version`: its ETag, or its time and size;
    "": unknown."""

    path: str
    size: int
    version: str


class FolderListing(NamedTuple):
    """What lies in a folder. `entries`: its files, or all below it. `folders`: those directly in
    it, without a "/" at the end, where only these were asked for. `unreadable`: paths that are
    there and cannot be read, by the reason."""

    entries: list[Entry]
    folders: list[str]
    unreadable: dict[str, list[str]]


class Backend(Protocol):
    path: str  # of the URL itself
    lists: bool = True
    # Whether write(create_only=True) is known to refuse an object that exists.
    creates_only: bool = True

    def look(self, folder: str, deep: bool) -> FolderListing:
        """What is directly in a folder ("" is the root), or all files below it, in one listing.
        Empty if there is none. Links to folders are followed."""

    def stat(self, path: str) -> Entry: ...

    def read(
        self, path: str, start: int, end: int | None, versioned: bool
    ) -> tuple[Buffer, Entry | None]:
        """The bytes, fewer where the object ends; and whose they are, if the store says or if
        `versioned`."""

    def write(self, path: str, content: Buffer, create_only: bool) -> None:
        """Whole or not at all. Raises FileExistsError if `create_only` meets an object."""

    def delete(self, path: str) -> None:
        """May raise FileNotFoundError where there is none."""

    def local_path(self, path: str) -> str | None:
        return None

"""Data that can only be read from its start to its end."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from elastic_dp.config.brace_lists import expand_braces
from elastic_dp.config.data_config import DataConfig, _Order
from elastic_dp.errors import SpecError

_OWN = ("dataset", "fingerprint", "folder", "storage_options")


@dataclass(frozen=True)
class IterableData(_Order):
    """Any iterable that ends: a `torch.utils.data.IterableDataset`, an `IterableDataset` of Hugging
    Face, or a function that returns a generator.

    The driver reads it once, before anything starts, and writes its rows as shards; a run that is
    started again uses these. Training reads them like any others, in the same order of rows.

    - `dataset`: gives dicts of tensors, NumPy arrays, numbers, texts, bytes, None, or lists of
      these, all with the same keys. It is not sent to the workers.
    - `fingerprint`: a string of yours that changes when the rows change (a version, a checksum).
      Shards that were written with another one are refused.
    - `folder`: where the shards are written, as a path or any fsspec URL; several runs may share
      it. None: a folder of the run.
    - `storage_options`: options for the store of `folder`.
    - `micro_batch_size`, `epochs`, `seed`, `tail`, `pack`, `decode`, `transform`, `collate_fn`,
      `workers`, `shuffle`, `memory_bytes`, `fill_nulls`: as in `DataConfig`.
    """

    dataset: Any
    fingerprint: str = field(kw_only=True)
    folder: str | None = field(default=None, kw_only=True)
    pack: int | None = field(default=None, kw_only=True)
    decode: Mapping[str, str] | None = field(default=None, kw_only=True)
    transform: Callable[..., Any] | None = field(default=None, kw_only=True)
    collate_fn: Callable[..., Any] | None = field(default=None, kw_only=True)
    workers: int = field(default=0, kw_only=True)
    shuffle: Literal["none", "rows", "full"] = field(default="rows", kw_only=True)
    memory_bytes: int = field(default=2 << 30, kw_only=True)
    fill_nulls: Mapping[str, Any] | None = field(default=None, kw_only=True)
    storage_options: Mapping[str, Any] | None = field(default=None, kw_only=True, repr=False)

    def __post_init__(self) -> None:
        self._check("IterableData")
        given: Any = self.folder
        if hasattr(given, "__fspath__"):  # a pathlib.Path
            object.__setattr__(self, "folder", given.__fspath__())
        if not isinstance(self.fingerprint, str) or not self.fingerprint:
            raise SpecError(
                f"IterableData.fingerprint is {self.fingerprint!r}, must be a string that changes "
                'when the rows change, such as "v1"'
            )
        if self.folder is not None and not (isinstance(self.folder, str) and self.folder):
            raise SpecError(f"IterableData.folder is {self.folder!r}, must be a path or URL")
        if self.folder is None and self.storage_options is not None:
            raise SpecError(
                "IterableData.storage_options is set, but folder is not: the rows are written to "
                "the run's folder, with the storage_options of ElasticTrainer"
            )
        self._check_dataset()
        try:
            self.read_from("-", None)
        except SpecError as error:
            raise type(error)(str(error).replace("DataConfig.", "IterableData.")) from None

    def __iter__(self) -> Iterator[Any]:
        """The items, from the first."""
        return iter(self.dataset() if self._is_function else self.dataset)

    def read_from(self, url: str, storage_options: Mapping[str, Any] | None) -> DataConfig:
        """The data of the shards at `url`, to which the rows were written."""
        own = {x.name: getattr(self, x.name) for x in fields(self) if x.name not in _OWN}
        if expand_braces(url) != [url]:  # the name of the folder looks like a list
            url = f"{url.replace('{', '[{]')}/*.parquet"
        return DataConfig(url, storage_options=storage_options, **own)

    @property
    def _is_function(self) -> bool:
        return callable(self.dataset) and not isinstance(self.dataset, Iterable)

    def _check_dataset(self) -> None:
        data, kind = self.dataset, type(self.dataset).__name__
        if isinstance(data, Iterator):
            raise SpecError(
                f"IterableData.dataset is a {kind}, which can be read only once: pass the function "
                "that makes it, without calling it, or an object whose __iter__ begins anew"
            )
        if isinstance(data, str | bytes | Mapping):
            raise SpecError(
                f"IterableData.dataset is a {kind}, must give dicts, one for each row; pass one "
                'dataset (for example the "train" split), or use DataConfig with a URL'
            )
        if self._is_function or hasattr(data, "__iter__"):
            return
        if hasattr(data, "__len__") and hasattr(data, "__getitem__"):
            raise SpecError(f"IterableData.dataset is a {kind} without __iter__; use MapStyleData")
        raise SpecError(
            f"IterableData.dataset is a {kind}, must be an iterable, or a function that returns one"
        )

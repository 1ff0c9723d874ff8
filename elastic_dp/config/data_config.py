"""The data that a job trains on, and how its rows become steps."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from elastic_dp.config.field_checks import check_fields
from elastic_dp.config.removed_names import REMOVED_AUDIO, refuses_removed_names
from elastic_dp.config.source_weights import Weights, sources_of, weights_by_step
from elastic_dp.errors import SpecError
from elastic_dp.urls import redact_url

_PACK_COLUMNS = ("position_ids", "document_ids")
_MOST_TOKENS = 2**31 - 1
_BRACE_LIST = re.compile(r"(?<!\[)\{(\d+\.\.\d+|[^{}]*,[^{}]*)\}")
_TABLES = ("pandas", "polars", "pyarrow")
_BLOCK_SOURCE = ("identity", "rows", "stored_bytes", "schema", "read")


@dataclass(frozen=True, kw_only=True)
class _Order:
    """The fields that both kinds of data set share: how rows become steps."""

    micro_batch_size: int
    epochs: int | None = None
    seed: int = 0
    tail: Literal["drop", "short"] = "drop"

    def _check(self, **least: float) -> None:
        if self.micro_batch_size is None:
            raise SpecError(
                f"{type(self).__name__}.micro_batch_size is None, must be a whole number"
            )
        check_fields(self, micro_batch_size=1, epochs=1, seed=0, workers=0, **least)


@refuses_removed_names
@dataclass(frozen=True, repr=False)
class DataConfig(_Order):
    """Shards of rows at a URL.

    - `url`: a folder, a file or a glob, as a path or any fsspec URL. A list of them is one data
      set. A dict gives each source its weight in every global batch; {0: {…}, 2000: {…}} changes
      the weights after 2,000 steps. Or a `elastic_dp.data.BlockSource`: rows of any other format or
      service.
    - `micro_batch_size`: rows of one virtual worker in one step.
    - `columns`: read only these columns.
    - `filter`: a pyarrow expression, such as `pyarrow.compute.field("x") > 3`: only rows for which
      it is true, and not null, are part of the data set. Columns that it uses and `columns` does
      not name are read for it alone.
    - `pack`: rows are documents, and a row of a micro-batch has `pack` tokens of documents end to
      end, with the columns "position_ids" and "document_ids". All columns must be lists with one
      number for each token, such as "input_ids". None: rows are as they are.
    - `pack_columns`: which of "position_ids" and "document_ids" packing makes: both, one, or () for
      neither. `columns` does not name them, as they are not read.
    - `decode`: {"image": "rgb"} decodes the images in a column of bytes to uint8 arrays [height,
      width, 3], before `transform`, in threads or in the processes of `workers`.
    - `transform`: a function of each micro-batch (a dict of arrays), before it becomes tensors.
      `transform(batch)` runs with the global generators of Python, NumPy and torch seeded by (seed,
      step, virtual worker). `transform(batch, rng)` receives a `numpy.random.Generator` instead,
      and runs ahead of the step in a thread.
    - `collate_fn`: makes the micro-batch itself from a dict of arrays.
    - `workers`: processes that run `transform` and `collate_fn` ahead of the step; 0: none.
    - `epochs`: passes over the data; None: no limit.
    - `seed`: decides the order of rows and the seeds of user code.
    - `shuffle`: "none"; "rows": permute the row groups, and rows within blocks of them; "full":
      permute all rows, which needs the data set in memory.
    - `tail`: what happens to rows that do not fill the last global batch of an epoch: "drop" them,
      or make a "short" batch with the right weights.
    - `memory_bytes`: limit for the row groups that one worker holds or is reading.
    - `cache_dir`: a folder of each machine in which its workers keep what they read from the store,
      for the next epochs and runs; an absolute path. Files of the machine itself are not copied.
    - `cache_bytes`: limit for what the cache keeps in `cache_dir`, which may hold other files.
    - `max_bad_fraction`: 0: the run fails if a row group, or an image for `decode`, cannot be
      decoded. Above 0: these rows are skipped and reported, and the run fails if they are more than
      this fraction of the rows (with weights: of the rows of a source).
    - `storage_options`: options for the store of `url`.
    """

    url: str | Sequence[str] | Weights | Mapping[int, Weights] | Any
    columns: Sequence[str] | None = field(default=None, kw_only=True)
    # The "==" of two expressions is another expression.
    filter: Any = field(default=None, kw_only=True, compare=False)
    pack: int | None = field(default=None, kw_only=True)
    pack_columns: Sequence[str] = field(default=_PACK_COLUMNS, kw_only=True)
    decode: Mapping[str, str] | None = field(default=None, kw_only=True)
    transform: Callable[..., Any] | None = field(default=None, kw_only=True)
    collate_fn: Callable[..., Any] | None = field(default=None, kw_only=True)
    workers: int = field(default=0, kw_only=True)
    shuffle: Literal["none", "rows", "full"] = field(default="rows", kw_only=True)
    memory_bytes: int = field(default=2 << 30, kw_only=True)
    cache_dir: str | None = field(default=None, kw_only=True)
    cache_bytes: int | None = field(default=None, kw_only=True)
    max_bad_fraction: float = field(default=0.0, kw_only=True)
    storage_options: Mapping[str, Any] | None = field(default=None, kw_only=True, repr=False)

    def __post_init__(self) -> None:
        self._check(memory_bytes=1 << 20, cache_bytes=1 << 20, pack=1)
        for name in ("url", "cache_dir"):
            object.__setattr__(self, name, _paths_as_text(getattr(self, name)))
        if self.block_source is not None:
            self._check_block_source()
        several = isinstance(self.url, Sequence | Mapping) or self.block_source is not None
        if not several or not self.urls or not all(isinstance(u, str) and u for u in self.urls):
            raise SpecError(
                f"DataConfig.url is {redact_url(repr(self.url))}, must be a path or URL, a "
                "list of them, a dict of them with weights, or a block source, with identity, "
                "rows, stored_bytes, schema and read"
            )
        for url in () if self.block_source is not None else self.urls:
            if _BRACE_LIST.search(url):
                raise SpecError(
                    f"DataConfig.url: {redact_url(url)!r} has a brace list, which is not expanded "
                    "any more: name the URLs in a list, such as "
                    "[f'part-{n:03}.tar' for n in range(11)], or use a glob"
                )
        if self.weights_by_step is not None and self.epochs is not None:
            raise SpecError(
                "DataConfig.epochs is set, but each weighted source counts its own epochs; set "
                "max_steps instead"
            )
        if self.weights_by_step is not None and self.tail != "drop":
            raise SpecError(
                f"DataConfig.tail is {self.tail!r}, and url has weights: a source begins again "
                "when its rows end, so that no global batch is short; leave tail out"
            )
        if not 0 <= self.max_bad_fraction <= 1:
            raise SpecError(f"DataConfig.max_bad_fraction is {self.max_bad_fraction!r}, not 0 to 1")
        self._check_cache()
        if self.columns is not None and not _are_names(self.columns):
            raise SpecError(
                f"DataConfig.columns is {self.columns!r}, must be a list of one column name or "
                "more, or None"
            )
        self._check_pack()
        self._check_decode()
        if self.filter is not None and type(self.filter).__name__ != "Expression":
            raise SpecError(
                f"DataConfig.filter is {self.filter!r}, must be an expression of pyarrow, such as "
                'pyarrow.compute.field("x") > 3'
            )

    def _check_decode(self) -> None:
        kinds: Any = self.decode or {}
        if isinstance(kinds, Mapping) and any("audio" in kind for kind in kinds.values()):
            raise SpecError(f"DataConfig.decode: {REMOVED_AUDIO}")
        if not isinstance(kinds, Mapping) or any(kind != "rgb" for kind in kinds.values()):
            raise SpecError(
                f'DataConfig.decode is {kinds!r}, must be a dict such as {{"x": "rgb"}}'
            )

    def _check_block_source(self) -> None:
        identity: Any = self.block_source.identity
        if not isinstance(identity, str) or not identity:
            raise SpecError(f"DataConfig.url: the identity of the source is {identity!r}, not text")
        for name in ("cache_dir", "storage_options"):
            if getattr(self, name) is not None:
                raise SpecError(
                    f"DataConfig.{name} is set, and url is a block source, which reads by itself; "
                    "give it to the source"
                )

    def _check_cache(self) -> None:
        given: Any = self.cache_dir
        if given is not None and not (isinstance(given, str) and given.startswith("/")):
            raise SpecError(
                f"DataConfig.cache_dir is {given!r}, must be the absolute path of a "
                "folder on the machines of the workers"
            )
        if (self.cache_dir is None) != (self.cache_bytes is None):
            alone = "cache_bytes" if self.cache_dir is None else "cache_dir"
            raise SpecError(
                f"DataConfig.{alone} is set alone; cache_dir is the folder of the cache, and "
                "cache_bytes its limit"
            )

    def _check_pack(self) -> None:
        if self.pack is not None and self.pack > _MOST_TOKENS:
            raise SpecError(
                f"DataConfig.pack is {self.pack}, must be at most {_MOST_TOKENS}, the largest "
                "number of position_ids, which are int32"
            )
        self._check_pack_columns()
        if self.pack is None:
            return
        alone = "DataConfig.pack is set, and"
        if isinstance(self.url, Mapping):
            raise SpecError(
                f"{alone} url has weights, which count rows; pack each source beforehand: "
                "`elastic-dp data convert --pack`, or leave the weights out"
            )
        if self.max_bad_fraction:
            raise SpecError(
                f"{alone} max_bad_fraction is {self.max_bad_fraction}; a packed row has documents "
                "of several row groups, so it must be 0"
            )

    def _check_pack_columns(self) -> None:
        made = self.pack_columns
        if not isinstance(made, list | tuple) or any(name not in _PACK_COLUMNS for name in made):
            raise SpecError(
                f"DataConfig.pack_columns is {made!r}, must be a list of "
                f"{' and '.join(map(repr, _PACK_COLUMNS))}, of one of them, or ()"
            )
        if self.pack is None and set(made) != set(_PACK_COLUMNS):
            raise SpecError(
                "DataConfig.pack_columns is set, and pack is not; set pack, or leave pack_columns "
                "out"
            )

    def __repr__(self) -> str:
        """Return the fields without credentials."""
        said = (f"{x.name}={getattr(self, x.name)!r}" for x in fields(self) if x.repr)
        return redact_url(f"DataConfig({', '.join(said)})")

    @property
    def block_source(self) -> Any:
        """The `elastic_dp.data.BlockSource` that `url` is; None if it is a URL, or several."""
        return self.url if all(hasattr(self.url, name) for name in _BLOCK_SOURCE) else None

    @property
    def urls(self) -> tuple[str, ...]:
        """The URLs of all sources."""
        if self.block_source is not None:
            return (self.block_source.identity,)
        if isinstance(self.url, Mapping):
            return tuple(sources_of(weights_by_step(self.url)))
        return (self.url,) if isinstance(self.url, str) else tuple(self.url)

    @property
    def weights_by_step(self) -> dict[int, Weights] | None:
        """The weights of the sources, by the number of steps after which they hold; None if the
        sources are one data set."""
        return weights_by_step(self.url) if isinstance(self.url, Mapping) else None


def _paths_as_text(given: Any) -> Any:
    """The value with each `pathlib.Path` in it as text."""
    if hasattr(given, "__fspath__"):
        return given.__fspath__()
    if isinstance(given, list | tuple):
        return type(given)(map(_paths_as_text, given))
    if isinstance(given, dict):
        return {_paths_as_text(key): _paths_as_text(value) for key, value in given.items()}
    return given


def _are_names(columns: Any) -> bool:
    is_list = isinstance(columns, Sequence) and not isinstance(columns, str)
    return is_list and bool(columns) and all(isinstance(name, str) for name in columns)


@refuses_removed_names
@dataclass(frozen=True)
class MapStyleData(_Order):
    """Any map-style `torch.utils.data.Dataset` (`__len__`, `__getitem__`), in the same order of
    rows.

    - `dataset`: is pickled and sent to every worker.
    - `collate_fn`: defaults to torch's `default_collate`.
    - `workers`: processes that fetch and collate ahead of the step; 0: the training thread does it.
    - `shuffle`: permute all rows in each epoch.
    - `fingerprint`: a string of yours that changes when the rows change (a version, a checksum). A
      run that is started again identifies its data by the class of the dataset, its number of rows,
      and `fingerprint`. Without one, the indices of `Subset`s and a few rows are compared, too.
    - `micro_batch_size`, `epochs`, `seed`, `tail`: as in `DataConfig`.
    """

    dataset: Any
    workers: int = field(default=0, kw_only=True)
    collate_fn: Callable[..., Any] | None = field(default=None, kw_only=True)
    shuffle: bool = field(default=True, kw_only=True)
    fingerprint: str = field(default="", kw_only=True)

    def __post_init__(self) -> None:
        self._check()
        if not isinstance(self.fingerprint, str):
            raise SpecError(f"MapStyleData.fingerprint is {self.fingerprint!r}, must be a string")
        data = self.dataset
        if isinstance(data, str) or (isinstance(data, Mapping) and {*data} != {*range(len(data))}):
            raise SpecError(
                f"MapStyleData.dataset is a {type(data).__name__}, whose items are not "
                'numbered from 0; pass one dataset (for example the "train" split), or use '
                "DataConfig with a URL"
            )
        if (library := type(data).__module__.partition(".")[0]) in _TABLES:
            raise SpecError(
                f"MapStyleData.dataset is a {type(data).__name__} of {library}, whose [0] is not "
                "its first row; write it as Parquet for DataConfig, or pass a list of its rows"
            )
        is_stream = any(base.__name__ == "IterableDataset" for base in type(data).__mro__)
        if is_stream or not hasattr(data, "__len__") or not hasattr(data, "__getitem__"):
            raise SpecError(
                "MapStyleData.dataset needs __len__ and __getitem__; write a stream of rows "
                "as shards once, by elastic_dp.dataprep.write_shards"
            )

"""Opening a data set: by the driver, which reads the index, and by the workers, which are given it."""

from __future__ import annotations

from elastic_dp.data.interface import Dataset, EvaluationData
from elastic_dp.data.manifest import Manifest, read_manifest
from elastic_dp.data.map_style import MapStyleDataset, MapStyleEvaluation
from elastic_dp.data.parquet import ParquetDataset, ParquetEvaluation
from elastic_dp.sampling import Order
from elastic_dp.spec import DataConfig, MapStyleData


def open_data(
    config: DataConfig | MapStyleData, *, virtual_workers: int, manifest: Manifest | None = None
) -> Dataset:
    """Training data. Without a `manifest` the index is read. Raises DataError where it cannot be used."""
    if isinstance(config, MapStyleData):
        return MapStyleDataset(config, virtual_workers=virtual_workers)
    manifest = manifest or read_manifest(config)
    order = Order(
        group_rows=manifest.group_rows,
        virtual_workers=virtual_workers,
        micro_batch_size=config.micro_batch_size,
        seed=config.seed,
        shuffle=config.shuffle,
        tail=config.tail,
    )
    return ParquetDataset(config, manifest, order)


def open_evaluation(
    config: DataConfig | MapStyleData, *, manifest: Manifest | None = None
) -> EvaluationData:
    """All rows once, in file order. Without a `manifest` the index is read."""
    if isinstance(config, MapStyleData):
        return MapStyleEvaluation(config)
    return ParquetEvaluation(config, manifest or read_manifest(config))

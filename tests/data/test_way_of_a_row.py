"""How many objects a row meets between the URL and the tensor. What only computes its place, and
values without behaviour, do not count."""

import dataclasses
import sys
import threading

import pyarrow as pa
import pyarrow.parquet as pq

from elastic_dp.config import DataConfig
from elastic_dp.data import open_data, read_index

PLACE = ("elastic_dp.config", "elastic_dp.sampling", "elastic_dp.data.pipeline.planner")


def test_a_row_meets_few_objects(tmp_path):
    for number in range(3):
        table = pa.table({"x": [float(number)] * 100})
        pq.write_table(table, tmp_path / f"{number}.parquet", row_group_size=20)
    config = DataConfig(str(tmp_path), micro_batch_size=4)
    index, met = read_index(config), set[type]()

    def note(frame, event, argument):
        if event == "call":
            met.add(type(frame.f_locals.get("self")))

    threading.setprofile(note)
    sys.setprofile(note)
    try:
        data = open_data(config, virtual_workers=2, index=index)
        data.read_ahead(1, range(2))
        for step in range(1, data.steps_per_epoch + 1):
            data.batch(step, 0)
            data.batch(step, 1)
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    data.close()
    ours = {
        one
        for one in met
        if one.__module__.startswith("elastic_dp.") and not one.__module__.startswith(PLACE)
    }
    behave = {one for one in ours if not (issubclass(one, tuple) or dataclasses.is_dataclass(one))}
    names = sorted(one.__name__ for one in behave)
    assert {"Store", "Parquet", "Pipeline", "Collator", "RowStream"} <= set(names)
    assert len(names) <= 15, names

"""A row group that cannot be decoded, and `max_bad_fraction=0.01`: left out in the same way for any
number of workers."""

import dataclasses

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from elastic_dp.config import DataConfig
from elastic_dp.data import open_data, read_index
from elastic_dp.errors import BadShard, DataError
from tests.data.shards import damage
from tests.runs import group, lines_of, local, resize, spec_of
from tests.train.jobs import adamw, classifier, cross_entropy, hold

SHARDS, GROUPS, ROWS = 4, 3, 16  # 192 rows: 6 steps an epoch


def points(folder, bad=(5,)):
    """Shards of points; row groups with these numbers are overwritten with garbage."""
    rng = np.random.default_rng(0)
    for shard in range(SHARDS):
        x = rng.standard_normal((GROUPS * ROWS, 16)).astype(np.float32)
        table = pa.table(
            {"x": pa.FixedSizeListArray.from_arrays(x.ravel(), 16), "y": x[:, :4].argmax(axis=1)}
        )
        pq.write_table(table, folder / f"part-{shard}.parquet", row_group_size=ROWS)
    config = DataConfig(str(folder), micro_batch_size=4, max_bad_fraction=0.99)
    damage(config, *bad)
    return config


def job(data, **options):
    return spec_of(steps=20, data=data, **options)


def train(ctx):
    model = classifier()
    optimizer = adamw(model)
    for step in ctx.steps(model, optimizer, cross_entropy, clip_norm=1.0):
        ctx.log({"weight": step.weight})
        hold(ctx, step)
    ctx.log(ctx.evaluate(cross_entropy, ctx.config["eval"]))


def test_any_number_of_workers_leaves_out_the_same_rows(tmp_path):
    config = points(tmp_path)
    evaluation = dataclasses.replace(config, micro_batch_size=10)
    calm = local(job(config, config={"eval": evaluation}), train)
    weights = [line["weight"] for line in calm.logged if "weight" in line]
    assert sum(weights[:6]) == SHARDS * GROUPS * ROWS - ROWS
    for sizes in ({0: 1}, {0: 3}, {2: 2, 5: 4, 12: 1}):
        spec = job(
            config,
            workers=min(sizes.values()) if 0 in sizes else 1,
            min_workers=1,
            config={"eval": evaluation, "hold": sizes},
        )
        script = [resize(step, size) for step, size in sizes.items()]
        outcome, run = group(spec, train, script=script)
        assert outcome.digest == calm.digest
        assert outcome.skipped == ("row group 2 of part-1.parquet",)
        said = [line["text"] for line in lines_of(run) if line.get("command") == "Explain"]
        assert any("without" in text and "part-1.parquet" in text for text in said)


def test_micro_batches_of_bad_rows_only_weigh_nothing(tmp_path):
    """Every row group but one: most micro-batches have no row left, some virtual workers none in
    any step."""
    config = points(tmp_path, bad=tuple(range(1, SHARDS * GROUPS)))
    evaluation = dataclasses.replace(config, micro_batch_size=10)
    spec = job(config, min_workers=3, config={"eval": evaluation})
    calm = local(spec, train)
    assert sum(line["weight"] for line in calm.logged[:6]) == ROWS
    outcome, _ = group(spec, train)
    assert outcome.digest == calm.digest and len(outcome.skipped) == SHARDS * GROUPS - 1


def test_the_default_names_the_shard(tmp_path):
    config = dataclasses.replace(points(tmp_path), max_bad_fraction=0)
    spec = job(config, config={"eval": config})
    with pytest.raises(BadShard, match=r"row group 2 of part-1\.parquet"):
        local(spec, train)
    outcome, _ = group(spec, train, fails=True)
    assert outcome.error is not None and "row group 2 of part-1.parquet" in outcome.error


def first_step_with(config, row_group, virtual_workers):
    data = open_data(config, virtual_workers=virtual_workers)
    try:
        data.mark_bad([row_group])
        steps = range(1, data.steps_per_epoch + 1)
        return next(s for s in steps if any(data.masked(s, v) for v in range(virtual_workers)))
    finally:
        data.close()


@pytest.mark.parametrize("workers", [1, 3])
def test_more_bad_rows_than_the_limit_end_any_group_at_the_same_step(workers, tmp_path):
    config = dataclasses.replace(points(tmp_path), max_bad_fraction=0.01)
    spec = job(config, workers=workers, min_workers=workers, config={"eval": config})
    step = first_step_with(config, 5, spec.scaling.num_virtual_workers)
    outcome, run = group(spec, train, fails=True)
    assert outcome.error is not None and "but 16 of the 192 rows of the data set" in outcome.error
    assert "row group 2 of part-1.parquet" in outcome.error and "raise max_bad_fr" in outcome.error
    assert run.controller.status()["step"] == step - 1


def test_bad_row_group_that_a_filter_cannot_read_counts_with_all_its_rows(tmp_path):
    config = dataclasses.replace(points(tmp_path), filter=pc.field("y") < 2)
    good = read_index(dataclasses.replace(points(tmp_path, bad=()), filter=config.filter)).rows
    points(tmp_path)  # damaged again
    assert 0 < good[5] < ROWS
    assert [*read_index(config).rows] == [*good[:5], ROWS, *good[6:]]
    calm = local(job(config, config={"eval": config}), train)
    steps = (sum(good) - good[5] + ROWS) // 32
    trained = sum(line["weight"] for line in calm.logged[:steps])
    assert sum(good) - good[5] - 32 < trained <= sum(good) - good[5]  # the last batch is dropped
    config = dataclasses.replace(config, max_bad_fraction=0.1)
    with pytest.raises(DataError, match=f"but 16 of the {sum(good) - good[5] + ROWS} rows"):
        local(job(config, config={"eval": config}), train)


def test_evaluation_with_more_bad_rows_than_the_limit_fails(tmp_path):
    for folder in "ab":
        (tmp_path / folder).mkdir()
    good, bad = points(tmp_path / "a", bad=()), points(tmp_path / "b")
    for limit, said in (0.01, "16 of the 192 rows of the evaluation"), (0.5, None):
        evaluation = dataclasses.replace(bad, micro_batch_size=10, max_bad_fraction=limit)
        spec = job(good, config={"eval": evaluation})
        if said is None:
            assert any("eval_loss" in line for line in local(spec, train).logged)
            continue
        with pytest.raises(DataError, match=said):
            local(spec, train)

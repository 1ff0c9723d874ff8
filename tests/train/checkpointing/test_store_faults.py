"""Training from a store that fails: the data stays exact, a store that is gone pauses the run, and
it goes on by itself."""

import dataclasses
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from elastic_dp.checkpoint import uploader
from elastic_dp.config import DataConfig
from elastic_dp.coordinator.messages import StopRequested
from tests.patience import eventually
from tests.runs import ENDLESS, PATIENT, group, local, spec_of
from tests.runs import texts_of as said
from tests.storage.conftest import send
from tests.storage.proxy import FAULTS, FaultProxy
from tests.storage.servers import s3_options
from tests.train.checkpointing import test_worker_checkpointer
from tests.train.gang.jobs import fully_sharded
from tests.train.jobs import adamw, average_and_plateau, classifier, loop

SHARDS, ROWS, GROUP_ROWS = 24, 48, 3
# bytes of a row that the loss does not look at, so that no worker can hold all of the data
PADDING = 4096
MEMORY_BYTES = 3 << 20
STEPS = 12


def shard(number):
    rng = np.random.default_rng(number)
    x = rng.standard_normal((ROWS, 16)).astype(np.float32)
    padding = rng.integers(0, 256, ROWS * PADDING, dtype=np.uint8)
    table = pa.table(
        {
            "x": pa.FixedSizeListArray.from_arrays(x.ravel(), 16),
            "y": x[:, :4].argmax(axis=1),
            "padding": pa.FixedSizeBinaryArray.from_buffers(
                pa.binary(PADDING), ROWS, [None, pa.py_buffer(padding)]
            ),
        }
    )
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, row_group_size=GROUP_ROWS, write_statistics=False)
    return sink.getvalue().to_pybytes()


def train(ctx):
    model = classifier()
    optimizer = adamw(model)
    loop(ctx, model, optimizer, clip_norm=1.0)


def job(data, storage_timeout_s, steps=STEPS):
    failure = dataclasses.replace(PATIENT, storage_timeout_s=storage_timeout_s)
    return spec_of(steps=steps, workers=2, min_workers=2, data=data, failure=failure)


def config(url, **options):
    return DataConfig(url, micro_batch_size=4, memory_bytes=MEMORY_BYTES, **options)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """The digest of the run of so many steps whose data lies on the disk."""
    folder = tmp_path_factory.mktemp("shards")
    for number in range(SHARDS):
        (folder / f"{number:02}.parquet").write_bytes(shard(number))
    return lambda steps: local(job(config(str(folder)), 60.0, steps), train).digest


def put(proxy, bucket, *, twice):
    """`twice`: each object was another one before, so that there is something stale to serve."""
    rates, proxy.rates = proxy.rates, {"stale": 1e-9}  # from now on it keeps what was before
    send("PUT", f"{proxy.url}/{bucket}")
    for number in range(SHARDS):
        if twice:
            send("PUT", f"{proxy.url}/{bucket}/{number:02}.parquet", shard(number)[::-1])
        send("PUT", f"{proxy.url}/{bucket}/{number:02}.parquet", shard(number))
    proxy.rates = rates
    return config(f"s3://{bucket}", storage_options=s3_options(proxy.url))


def test_run_with_one_faulty_request_in_twenty_has_the_undisturbed_digest(undisturbed, moto):
    """The index has nobody to tell that the store is away, so it is given a minute: a stall ends by
    itself before."""
    with FaultProxy(moto, dict.fromkeys(FAULTS, 0.05), seed=3, stall_s=1.0) as proxy:
        data = put(proxy, "fails-in-each-way", twice=True)
        outcome, _ = group(job(data, 60.0), train)
        assert outcome.digest == undisturbed(STEPS)
        assert set(proxy.faults) == set(FAULTS)


def test_a_store_that_is_gone_pauses_the_run(undisturbed, moto):
    """The store comes back when the run has said that it waits."""
    with FaultProxy(moto) as proxy:
        data = put(proxy, "is-gone", twice=False)

        def away(run):
            proxy.go_away()
            eventually(lambda: any("going on until it is back" in text for text in said(run)))
            proxy.come_back()
            eventually(lambda: any("is-gone is back" in text for text in said(run)))

        script = [(2, away), (2, StopRequested("enough"))]
        endless = job(data, 3.0, ENDLESS)
        outcome, _ = group(endless, train, script=script)
        assert outcome.digest == undisturbed(outcome.step)
        assert outcome.workers_lost == 0


def sharded(ctx):
    model = fully_sharded(ctx)
    loop(ctx, model, adamw(model))


def test_all_processes_of_a_worker_wait_for_a_store_that_is_gone(moto):
    """The first one may wait for another one, which waits for the store."""
    with FaultProxy(moto) as proxy:
        data = put(proxy, "is-gone-for-all", twice=False)

        def away(run):
            def told(words):
                eventually(
                    lambda: run.controller.ended.is_set() or any(words in one for one in said(run))
                )

            proxy.go_away()
            told("going on until it is back")
            time.sleep(3.0)  # as long as others try before they wait
            proxy.come_back()
            told("is-gone-for-all is back")

        failure = dataclasses.replace(PATIENT, storage_timeout_s=2.5)
        spec = spec_of(
            steps=ENDLESS, workers=1, virtual=4, data=data, failure=failure, processes_per_worker=2
        )
        outcome, _ = group(spec, sharded, script=[(2, away), (3, StopRequested("enough"))])
        assert outcome.workers_lost == 0


def keeps_in_a_store_that_is_away(ctx):
    """Except for step 5, no write of a member ends before the file `back` is there."""
    store, back = ctx._session.checkpoints._catalog.store, Path(ctx.config["back"])
    write, uploader.PATIENCE_S = store.write, 0.3

    def waiting(path, *args, **options):
        while "00005/" not in path and not back.exists():
            time.sleep(0.01)
        write(path, *args, **options)

    store.write = waiting
    average_and_plateau(ctx)


def test_training_goes_on_while_checkpoints_cannot_be_written(tmp_path):
    """A deferred checkpoint is taken when the store is back."""
    spec = test_worker_checkpointer.job()
    calm = local(spec, average_and_plateau)
    url, first, back, second = (tmp_path / name for name in ("run", "first", "back", "second"))
    gates = {8: str(first), 21: str(back), 22: str(second)}  # `first`, `second`: are committed
    spec = dataclasses.replace(spec, config=spec.config | {"back": str(back), "gates": gates})
    script = [
        (1, test_worker_checkpointer.when_committed(url, 5, lambda run: first.touch())),
        (20, lambda run: back.touch()),
        (20, test_worker_checkpointer.when_committed(url, 10, lambda run: second.touch())),
    ]
    train = keeps_in_a_store_that_is_away
    outcome, run = group(spec, train, script=script, url=str(url))
    assert (outcome.digest, outcome.step) == (calm.digest, 30)
    put_off = [text for text in said(run) if "that of step 10 is still being written" in text]
    assert 1 <= len(put_off) <= 3, "each says it once, and training goes on"
    committed = [int(text.split()[3]) for text in said(run) if "is committed" in text]
    assert committed[:2] == [5, 10] and committed[-1] == 30, committed
    assert 20 < committed[2] < 30, "what was deferred is not waited for until it is due again"

"""Starts that cannot be: data, storage, a train function, or a run that is another one."""

import functools
import threading
import warnings

import cloudpickle
import pytest

import elastic_dp as edp
from elastic_dp import errors
from elastic_dp.errors import (
    RunMismatch,
    SpecError,
    StorageError,
)
from tests.bad_input.jobs import good, trainer
from tests.runs import Points, spec_of
from tests.train.jobs import adamw, classifier, cross_entropy


def test_start_without_shards_is_refused(tmp_path):
    with pytest.raises(errors.DataError, match=str(tmp_path)):
        edp.ElasticTrainer(
            good,
            name="job",
            data=edp.DataConfig(str(tmp_path), micro_batch_size=1),
            storage_path=str(tmp_path),
            max_steps=1,
        ).start()


def test_start_with_too_few_rows_for_a_global_batch_is_refused(tmp_path):
    with pytest.raises(errors.DataError, match="7 rows"):
        trainer(tmp_path, good, rows=7).start()


def test_train_function_that_cannot_be_pickled_is_refused(tmp_path):
    lock = threading.Lock()

    def train(ctx):
        with lock:
            good(ctx)

    with pytest.raises(SpecError, match="cannot be sent to workers"):
        trainer(tmp_path, train).start()


def good_with(ctx, *, steps):
    good(ctx)


class Trains:
    def __call__(self, ctx):
        good(ctx)

    def method(self, ctx):
        good(ctx)


@pytest.mark.parametrize(
    "train",
    [functools.partial(good_with, steps=3), Trains(), Trains().method, functools.partial(Trains())],
    ids=["partial", "object", "method", "partial of an object"],
)
def test_train_may_be_any_callable(tmp_path, train):
    _, sent = cloudpickle.loads(trainer(tmp_path, train)._pickle())
    assert trainer(tmp_path, sent).fit(local=True).step == 4


@pytest.mark.parametrize("local", [False, True])
def test_storage_path_that_cannot_be_written_is_refused(tmp_path, local):
    (tmp_path / "file").write_text("not a folder")
    trainer = edp.ElasticTrainer(
        lambda ctx: None,
        name="nowhere",
        storage_path=str(tmp_path / "file"),
        data=edp.MapStyleData(Points(), micro_batch_size=4),
        max_steps=1,
    )
    with pytest.raises(StorageError, match=r"cannot write .*Not a directory"):
        trainer.fit(local=local)


@pytest.mark.parametrize(
    ("first", "again", "steps"),
    [
        ({"epochs": 1}, {"epochs": 2}, 48),
        ({"epochs": 1}, {"epochs": 2, "max_steps": 24}, 24),
        ({"max_steps": 4}, {"max_steps": 6}, 6),
        ({"max_steps": 30, "stop_at": 3}, {"max_steps": 30}, 3),
        ({"max_steps": 40, "max_time_s": 0.001}, {"max_steps": 40, "max_time_s": 60}, 40),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                ({"epochs": 1}, {"epochs": 1}, 24),
                ({"epochs": 2}, {"epochs": 1}, 48),
                ({"max_steps": 4}, {"max_steps": None, "epochs": 1}, 24),
                ({"max_steps": 30, "stop_at": 3}, {"max_steps": 31}, 31),
                ({"max_steps": 4, "max_time_s": 50}, {"max_steps": 4, "max_time_s": 60}, 4),
            )
        ),
    ],
)
def test_rerun_with_a_raised_limit_goes_on(tmp_path, first, again, steps):
    def fit(epochs=None, stop_at=None, **limits):
        def train(ctx):
            model = classifier()
            for step in ctx.steps(model, adamw(model), cross_entropy):
                if step.number == stop_at:
                    ctx.stop("enough")

        data = edp.MapStyleData(Points(), micro_batch_size=4, epochs=epochs)
        scaling = edp.ScalingConfig(max_workers=2)
        at = {"name": "limits", "storage_path": str(tmp_path)}
        return edp.ElasticTrainer(train, data=data, scaling=scaling, **at, **limits).fit(local=True)

    before = fit(**first)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        after = fit(**again)
    others = first | {"stop_at": 0} != again | {"stop_at": 0}
    told = [str(w.message) for w in caught if "under other limits" in str(w.message)]
    assert len(told) == (after == before and others)
    assert after.step == steps
    assert (after == before) == (before.step == steps)


def test_rerun_keeps_the_virtual_workers_of_the_first_start(tmp_path):
    def fit(workers, steps):
        scaling = edp.ScalingConfig(max_workers=workers)
        data = edp.MapStyleData(Points(), micro_batch_size=4)
        return edp.ElasticTrainer(
            good,
            data=data,
            name="v",
            storage_path=str(tmp_path),
            scaling=scaling,
            max_steps=steps,
        ).fit(local=True)

    first = fit(2, 4)
    assert fit(1, 4) == first  # the stored result
    assert (
        fit(1, 6).weights_sha256
        == trainer(tmp_path, good, max_steps=6).fit(local=True).weights_sha256
    )
    with pytest.raises(RunMismatch, match=r"max_workers is 3, .* virtual_workers=2"):
        fit(3, 4)


def test_scale_out_of_bounds_is_refused(tmp_path):
    spec = spec_of(min_workers=2)
    run = edp.Run(spec, str(tmp_path), controller=object())
    run._ask = lambda *_: {"size": 8, "min_workers": 3}  # as an operator has set it since
    for size in (2, 9, 2.5, True, "3", None):
        with pytest.raises(SpecError, match=rf"size is {size!r}, must .* within 3\.\.8"):
            run.scale(size)
    for least in (0, 9, True):
        with pytest.raises(SpecError, match=rf"min_workers is {least}, must .* within 1\.\.8"):
            run.scale(4, min_workers=least)
    with pytest.raises(SpecError, match=r"size is 4, must be a whole number within 5\.\.8"):
        run.scale(4, min_workers=5)

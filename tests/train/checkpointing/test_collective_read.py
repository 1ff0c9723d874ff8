"""A group reads a checkpoint once: each member a share, the rest from the others. Whoever dies, is
slow or finds damage."""

import dataclasses
import os
import shutil
import signal

import pytest
from torch import nn

from elastic_dp.checkpoint.catalog import Catalog
from elastic_dp.storage import Store
from elastic_dp.train.checkpointing import collective_read
from tests.patience import eventually
from tests.runs import formed_of, group, in_turn, local, scaled, texts_of
from tests.train.checkpointing.test_worker_checkpointer import job
from tests.train.jobs import adamw, loop

STEPS = 16
HANG_TIMEOUT_S = 10.0  # so long nobody stands still for want of a processor


def wide(ctx):
    """Train a model whose state makes four parts."""
    model = nn.Sequential(nn.Linear(16, 512), nn.ReLU(), nn.Linear(512, 512), nn.Linear(512, 4))
    loop(ctx, model, adamw(model))


def counted(log, slow=-1, comes=None):
    """The same; each member writes down what it reads, and one waits for the store until that file
    is there."""

    def train(ctx):
        read = collective_read.read_request

        def count(catalog, commit, request, targets):
            if ctx.rank == slow:
                eventually(comes.exists)
            read(catalog, commit, request, targets)
            with open(log, "a", encoding="utf-8") as file:
                file.write(f"{ctx.rank} {request.blob.name} {request.first} {request.nbytes}\n")

        collective_read.read_request = count
        wide(ctx)

    return train


def dying(rank, once):
    """The same; the first of this rank dies in the middle of what the members send each other."""

    def train(ctx):
        move = collective_read.move

        def die(group, *given):
            all_to_all, sent = group.all_to_all, []

            def counted(*given):
                sent.append(given)
                if len(sent) == 3 and group.rank == rank and not os.path.exists(once):
                    open(once, "x").close()
                    os.kill(os.getpid(), signal.SIGKILL)
                return all_to_all(*given)

            group.all_to_all = counted
            return move(group, *given)

        collective_read.move = die
        wide(ctx)

    return train


def spec_for(workers, steps=STEPS):
    return scaled(job(steps=steps, workers=workers), min_workers=workers, virtual_workers=8)


@pytest.fixture(scope="module")
def calm():
    return local(spec_for(3), wide)


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """Checkpoints of steps 5 and 10, by two."""
    folder = tmp_path_factory.mktemp("written")
    group(spec_for(2, steps=10), wide, url=str(folder))
    return folder


@pytest.fixture
def there(written, tmp_path):
    return shutil.copytree(written, tmp_path / "run")


@pytest.mark.parametrize(
    ("readers", "slow"), [(1, -1), pytest.param(2, -1, marks=pytest.mark.slow), (3, 1)]
)
def test_each_byte_is_read_once_by_whatever_group(readers, slow, calm, there, tmp_path):
    commit = Catalog(Store(str(there))).find(10)
    assert len(commit.manifest.blobs) >= 3
    train = counted(str(tmp_path / "read"), slow, comes := tmp_path / "comes")
    spec, script = spec_for(readers), []
    if slow >= 0:  # for longer than a hang may last
        failure = dataclasses.replace(spec.failure, hang_timeout_s=HANG_TIMEOUT_S)
        spec = dataclasses.replace(spec, failure=failure)
        script = [(0, lambda run: (waits(run), comes.touch()))]
    outcome, run = group(spec, train, script=script, url=str(there))
    assert (outcome.digest, len(formed_of(run)), outcome.workers_lost) == (calm.digest, 1, 0)
    lines = [line.split() for line in (tmp_path / "read").read_text().splitlines()]
    assert {rank for rank, *_ in lines} == set(map(str, range(readers)))
    assert len({(name, first) for _, name, first, _ in lines}) == len(lines)
    assert sum(int(nbytes) for *_, nbytes in lines) == commit.nbytes


def waits(run):
    """Wait until that is said of one."""
    eventually(lambda: any(text.startswith("no step in") for text in texts_of(run)))


def test_damage_in_one_share_sends_all_to_the_checkpoint_before(calm, there):
    last = sorted(there.glob("checkpoints/step-*10/*"))[-1]
    content = bytearray(last.read_bytes())
    content[-1] ^= 1
    last.write_bytes(content)
    outcome, run = group(spec_for(3), wide, url=str(there))
    assert (outcome.digest, len(formed_of(run))) == (calm.digest, 1)
    told = [text for text in texts_of(run) if "step 10 is damaged" in text]
    assert len(told) == 1 and last.name in told[0]


def test_restore_without_an_undamaged_checkpoint_fails_the_run(there):
    for part in there.glob("checkpoints/step-*/*"):
        part.write_bytes(bytes(part.stat().st_size))
    outcome, _ = group(spec_for(2), wide, url=str(there), fails=True)
    assert outcome.error is not None and "none of the 2 checkpoints" in outcome.error


@pytest.mark.parametrize("point", ["restoring", "sharing"])
def test_killed_as_it_begins_and_when_its_share_is_read(point, calm, there, tmp_path):
    """Each rank in turn, each in a generation of its own."""
    faults = in_turn([{"rank": rank} for rank in range(3)], tmp_path, point=point)
    outcome, _ = group(spec_for(3), wide, faults=faults, url=str(there))
    assert all(os.path.exists(fault.once) for fault in faults)
    assert (outcome.digest, outcome.workers_lost) == (calm.digest, 3)


@pytest.mark.parametrize("rank", [0, 1, pytest.param(2, marks=pytest.mark.slow)])
def test_killed_in_the_middle_of_sharing(rank, calm, there, tmp_path):
    once = str(tmp_path / "dead")
    outcome, _ = group(spec_for(3), dying(rank, once), url=str(there))
    assert os.path.exists(once)
    assert (outcome.digest, outcome.workers_lost) == (calm.digest, 1)

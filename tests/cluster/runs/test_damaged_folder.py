"""Every file and folder of a run's folder, damaged in every way: the same result, or an error that
says what to do. Nothing hangs.

What there is is listed from a real run, so a new kind of file is tried as soon as there is one. The
runs are local ones, which read and write the same files as those on a cluster.
"""

import hashlib
import json
import os
import random
import shutil
import threading
import time
import warnings

import pytest
import torch

import elastic_dp as edp
from elastic_dp.config import FailureConfig
from elastic_dp.errors import ElasticError
from tests.patience import PATIENCE_S, Stalls
from tests.runs import Points
from tests.train.jobs import classifier, cross_entropy

WITHIN_S = 30.0  # and no wait of a minute, as by default for a store or a lease
LEASE_S = 1.0  # how long a lease that cannot be read is waited for
WAYS_OUT = ("elete", "move it away", "pgrade", "new name", "mend")


def fit(folder, max_steps, at_step=lambda number: None):
    def train(ctx):
        model = classifier(16)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        for step in ctx.steps(model, optimizer, cross_entropy):
            ctx.log({"loss": step.loss})
            at_step(step.number)

    trainer = edp.ElasticTrainer(
        train,
        name=folder.name,
        storage_path=str(folder.parent),
        data=edp.MapStyleData(Points(192), micro_batch_size=4),
        scaling=edp.ScalingConfig(max_workers=2, virtual_workers=2),
        checkpoint=edp.CheckpointConfig(every_steps=2),
        failure=FailureConfig(run_lease_s=LEASE_S),
        max_steps=max_steps,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return trainer.fit(local=True)


# ------------------------------------------------------------------------------------------ damages


def _other_types(path):
    """Each value is another kind of thing."""
    if isinstance(stored := _json(path), dict):
        path.write_text(json.dumps({key: [[value]] for key, value in stored.items()}))


def _more_fields(path):
    """Add a field, as a compatible later version would."""
    if isinstance(stored := _json(path), dict):
        for part in (stored, stored.get("body", {}), stored.get("body", {}).get("about", {})):
            part["of a later version"] = {"x": 1}
        if "body" in stored:
            stored["digest"] = hashlib.sha256(_canonical(stored["body"])).hexdigest()
        path.write_bytes(_canonical(stored))


def _later_format(path):
    if isinstance(stored := _json(path), dict):
        number = "elastic_dp_checkpoint" if "body" in stored else "format"
        path.write_bytes(_canonical(stored | {number: 99}))


def _missing(path):
    shutil.rmtree(path) if path.is_dir() else path.unlink()


def _folder(path):
    _missing(path)
    path.mkdir()


def _file(path):
    _missing(path)
    path.write_text("no folder")


def _link_to_itself(path):
    _missing(path)
    path.symlink_to(path.name)


def _pipe(path):
    _missing(path)
    os.mkfifo(path)


def _json(path):
    try:
        return json.loads(path.read_bytes())
    except ValueError:
        return None


def _canonical(value):
    return json.dumps(value, separators=(",", ":")).encode()


OF_FILES = {
    "empty": lambda path: path.write_bytes(b""),
    "cut_off": lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
    "list": lambda path: path.write_text("[]"),
    "object": lambda path: path.write_text("{}"),
    "deep": lambda path: path.write_text("[" * 100_000),
    "noise": lambda path: path.write_bytes(random.Random(0).randbytes(200)),
    "other_types": _other_types,
    "more_fields": _more_fields,
    "later_format": _later_format,
    "missing": _missing,
    "folder": _folder,
    "link_to_itself": _link_to_itself,
    "pipe": _pipe,
}
OF_FOLDERS = {"missing": _missing, "file": _file, "link_to_itself": _link_to_itself}


# ------------------------------------------------------------------------------------------ the
# runs


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """The folder of a run that was started twice, to steps 2 and 4; and the digests of four and of
    six steps."""
    path = tmp_path_factory.mktemp("runs")
    fit(path / "run", 2)
    four = fit(path / "run", 4).weights_sha256
    for kind in ("logs/w1.log", "checkpoints/link"):  # of workers; of somebody else
        (path / "run" / kind).parent.mkdir(exist_ok=True)
        (path / "run" / kind).write_text("words")
    six = fit(path / "six", 6).weights_sha256
    return path / "run", {4: four, 6: six}


def outcome_of(folder, max_steps, **more):
    """The digest, or the error; fails if it takes too long."""
    found = []

    def run():
        try:
            found.append(fit(folder, max_steps, **more).weights_sha256)
        except BaseException as error:
            found.append(error)

    thread = threading.Thread(target=run, daemon=True)
    began = time.monotonic()
    with Stalls() as stalls:
        thread.start()
        thread.join(PATIENCE_S)
    took_s = time.monotonic() - began - stalls.lost_s
    if thread.is_alive():
        return "it hangs"
    return found[0] if took_s < WITHIN_S else f"it took {took_s:.1f} s"


def what_is_wrong(outcome, digest):
    if outcome == digest:
        return ""
    if not isinstance(outcome, ElasticError):
        return repr(outcome)
    if not any(word in str(outcome) for word in WAYS_OUT):
        return f"no way out: {outcome}"
    return "" if "/" in str(outcome) else f"no path: {outcome}"


def tried(runs, tmp_path, damage, kinds, max_steps, result):
    """What is wrong, by what was damaged."""
    run, digests = runs
    wrong = {}
    for number, at in enumerate(sorted(run.rglob("*"))):
        if not kinds(at):
            continue
        folder = tmp_path / str(number)
        shutil.copytree(run, folder)
        if not result:
            (folder / "result.json").unlink()
        target = folder / at.relative_to(run)
        if target.exists():
            damage(target)
            if words := what_is_wrong(outcome_of(folder, max_steps), digests[max_steps]):
                wrong[str(at.relative_to(run))] = words
        shutil.rmtree(folder)
    return wrong


# Finished; killed at its end; to go on.
@pytest.mark.parametrize(
    ("max_steps", "result"),
    [(4, True), *(pytest.param(*case, marks=pytest.mark.slow) for case in ((4, False), (6, True)))],
)
@pytest.mark.parametrize("damage", OF_FILES.values(), ids=OF_FILES)
def test_a_start_with_a_damaged_file_ends_as_it_would_or_says_why(
    runs, tmp_path, damage, max_steps, result
):
    assert not tried(runs, tmp_path, damage, lambda p: p.is_file(), max_steps, result)


@pytest.mark.parametrize("damage", OF_FOLDERS.values(), ids=OF_FOLDERS)
def test_a_start_with_a_damaged_folder_ends_as_it_would_or_says_why(runs, tmp_path, damage):
    assert not tried(runs, tmp_path, damage, lambda p: p.is_dir(), 6, True)


# Each kind of damage meets the same readers; the others take the long run.
IN_SHORT = ("list",)


@pytest.mark.parametrize(
    "damage",
    [
        pytest.param(damage, marks=() if name in IN_SHORT else pytest.mark.slow, id=name)
        for name, damage in OF_FILES.items()
    ],
)
def test_a_file_damaged_under_a_running_job_changes_nothing_or_is_told(runs, tmp_path, damage):
    run, digests = runs
    wrong = {}
    for kind in sorted(run.rglob("*")):
        if not kind.is_file():
            continue
        folder = tmp_path / kind.name
        shutil.copytree(run, folder)

        def damaged(number, folder=folder, kind=kind):
            if number == 5:  # the newest of its kind, which may have come since
                beside = (folder / kind.relative_to(run)).parent.glob(f"*{kind.suffix}")
                damage(max(path for path in beside if path.is_file()))

        if words := what_is_wrong(outcome_of(folder, 6, at_step=damaged), digests[6]):
            wrong[str(kind.relative_to(run))] = words
        shutil.rmtree(folder)
    assert not wrong

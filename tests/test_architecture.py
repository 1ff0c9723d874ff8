"""Three rings, imports point inward; the words that mean nothing are not used as names."""

import ast
import inspect
import operator
import subprocess
import sys
from pathlib import Path

import pytest

import elastic_dp
from elastic_dp.train.state import StepRecord

ROOT = Path(__file__).parent.parent / "elastic_dp"

# Who may import what of ours; `protocol.messages` is the language everybody speaks.
ALLOWED = {
    "errors": set(),
    "urls": set(),
    "shipping": set(),
    "threads": {"errors"},
    "wording": set(),
    "spec": {"errors", "urls"},
    "protocol": {"errors", "wording", "protocol"},
    "sampling": {"errors", "sampling"},
    "telemetry": {"errors", "telemetry", "threads"},
    "storage": {"errors", "urls", "storage"},
    "data": {"errors", "spec", "sampling", "shipping", "storage", "data", "threads"},
    "checkpoint": {"errors", "storage", "checkpoint"},
    "distributed": {"errors", "distributed", "threads"},
    "train": {
        "errors",
        "spec",
        "protocol.messages",
        "sampling",
        "shipping",
        "wording",
        "storage",
        "data",
        "checkpoint",
        "distributed",
        "telemetry",
        "threads",
        "train",
    },
    "cluster": {
        *("errors", "spec", "protocol", "sampling", "storage", "data", "checkpoint"),
        *("distributed", "train", "telemetry", "cluster", "shipping", "threads", "wording"),
    },
    "cli": {"errors", "spec", "data", "storage", "checkpoint", "cluster"},
    "__init__": {"spec", "train", "cluster", "checkpoint"},
}

PURE = {"errors", "urls", "wording", "spec", "protocol", "sampling"}
NEVER_IN_PURE = {
    *("time", "datetime", "random", "threading", "asyncio", "socket", "os", "logging"),
    *("subprocess", "torch", "ray", "pyarrow", "fsspec", "obstore"),
}
NEVER_IN_STORAGE = {"torch", "ray", "numpy", "pyarrow"}  # it moves bytes
BANNED_NAMES = {"utils", "common", "core", "helpers", "base", "manager", "misc", "types"}


def modules():
    return sorted(ROOT.rglob("*.py"))


def imports(path):
    """(line, dotted name) of everything that `path` imports, also inside functions."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield node.lineno, node.module


def part_of(path):
    inner = path.relative_to(ROOT)
    return inner.parts[0] if len(inner.parts) > 1 else inner.stem


@pytest.mark.parametrize("path", modules(), ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_point_inward(path):
    part = part_of(path)
    for line, name in imports(path):
        pieces = name.split(".")
        where = f"{path.relative_to(ROOT)}:{line} imports {name}"
        if pieces[0] == "elastic_dp":
            allowed = ALLOWED[part]
            ours = pieces[1] if len(pieces) > 1 else "__init__"
            assert ours in allowed or ".".join(pieces[1:3]) in allowed or ours == "errors", where
        elif pieces[0] == "ray":
            assert part == "cluster", where
        elif part in PURE:
            assert pieces[0] not in NEVER_IN_PURE, where
        elif part == "storage":
            assert pieces[0] not in NEVER_IN_STORAGE, where
    assert path.stem not in BANNED_NAMES


def test_every_module_says_what_it_does():
    for path in modules():
        tree = ast.parse(path.read_text())
        assert not tree.body or ast.get_docstring(tree), path


def test_no_file_grows_into_a_god():
    for path in modules():
        assert len(path.read_text().splitlines()) <= 500, path


def test_threads_are_started_where_their_end_is_seen():
    for path in modules():
        if path != ROOT / "threads.py":
            assert "threading.Thread(" not in path.read_text(), f"{path}: see threads.py"


# What users' scripts depend on. A name may be added; none is renamed, taken away, or moved to another place.
PARAMETERS = {
    "ElasticTrainer": "train *data name storage_path config scaling checkpoint failure exact max_steps max_time_s loggers "
    "labels runtime_env",
    "ElasticTrainer.fit": "self local",
    "attach": "name storage_path",
    "TrainContext.steps": "self model optimizer loss_fn *scheduler clip_norm precision state",
    "TrainContext.evaluate": "self fn data *model",
    "TrainContext.log": "self metrics",
    "TrainContext.stop": "self reason",
    "TrainContext.checkpoint": "self metrics",
    "DataConfig": "url *micro_batch_size epochs seed tail format columns transform collate_fn workers shuffle memory_bytes "
    "on_bad_shard max_bad_fraction storage_options",
    "MapStyleData": "dataset *micro_batch_size epochs seed tail workers collate_fn shuffle fingerprint",
    "ScalingConfig": "*min_workers max_workers virtual_workers standby resources_per_worker threads_per_worker "
    "stabilization_s market min_on_demand zones label_selector balance",
    "CheckpointConfig": "*every_steps every_s every num_to_keep keep_every checkpoint_score_attribute "
    "checkpoint_score_order",
    "FailureConfig": "*heartbeat_timeout_s lease_s forming_timeout_s hang_timeout_s release_timeout_s "
    "compare_weights_every max_losses_without_progress max_losses_of_micro_batch max_out_of_memory max_user_errors "
    "storage_timeout_s run_lease_s orphan_timeout_s",
}
MEMBERS = {
    "TrainContext": "checkpoint config device evaluate generation is_source log rank seed steps steps_per_epoch stop "
    "total_steps world_size",
    "Run": "checkpoint drain events interrupted logs pids result scale status stop",
    "Step": "number epoch epoch_end loss weight metrics grad_norm lr",
}


def test_public_names_are_exactly_these():
    names = (
        "CheckpointConfig DataConfig ElasticTrainer FailureConfig MapStyleData Result Run ScalingConfig Step TrainContext "
        "attach load_state"
    )
    assert elastic_dp.__all__ == dir(elastic_dp) == names.split()
    for name in elastic_dp.__all__:
        assert hasattr(elastic_dp, name)


@pytest.mark.parametrize("name", PARAMETERS)
def test_public_parameters_are_exactly_these(name):
    """In this order, those behind the star by name only."""
    parameters = inspect.signature(operator.attrgetter(name)(elastic_dp)).parameters.values()
    places = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    named = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY]
    assert len(places) + len(named) == len(parameters)
    wanted, _, by_name = PARAMETERS[name].partition("*")
    assert (places, named) == (wanted.split(), by_name.split())


@pytest.mark.parametrize("name", MEMBERS)
def test_public_members_are_exactly_these(name):
    of = getattr(elastic_dp, name)
    if name == "Step":  # sets most of them as it is made
        of = of(StepRecord(1, 0, False, loss=0.5, weight=4.0, metrics={}, lr=0.1), None)
    assert {found for found in dir(of) if not found.startswith("_")} == set(MEMBERS[name].split())


def test_the_command_line_starts_without_torch_and_ray():
    look = "import sys, elastic_dp.cli; print({'torch', 'ray'} & set(sys.modules))"
    command = [sys.executable, "-c", look]
    said = subprocess.run(command, cwd=ROOT.parent, capture_output=True, text=True, check=True)
    assert said.stdout == "set()\n"

"""Three rings, imports point inward; the words that mean nothing are not used as names."""

import ast
import inspect
import operator
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

import elastic_dp
from elastic_dp.coordinator.phases import (
    TABLE,
    IllegalTransition,
    Phase,
    PhaseMachine,
    Transition,
)
from elastic_dp.train.state.step_record import StepRecord

ROOT = Path(__file__).parent.parent / "elastic_dp"

# Who may import what of ours; `coordinator.messages` is the language everybody speaks.
ALLOWED = {
    "errors": set(),
    "urls": set(),
    "module_pickling": set(),
    "threads": {"errors"},
    "wording": set(),
    "config": {"errors", "urls", "config"},
    "coordinator": {"errors", "wording", "coordinator"},
    "sampling": {"errors", "sampling"},
    "telemetry": {"errors", "storage", "telemetry", "threads"},
    "storage": {"errors", "urls", "storage"},
    "data": {
        *("errors", "config", "device", "sampling", "module_pickling", "storage", "data"),
        "threads",
    },
    "dataprep": {"errors", "config", "sampling", "storage", "data", "dataprep", "threads"},
    "checkpoint": {"errors", "storage", "checkpoint", "device"},
    "device": {"errors", "device"},
    "distributed": {"errors", "device", "distributed", "threads"},
    "train": {
        "errors",
        "config",
        "coordinator.messages",
        "sampling",
        "module_pickling",
        "wording",
        "storage",
        "data",
        "checkpoint",
        "device",
        "distributed",
        "telemetry",
        "threads",
        "train",
    },
    "cluster": {
        *("errors", "config", "coordinator", "sampling", "storage", "data", "checkpoint"),
        *("device", "distributed", "train", "telemetry", "cluster", "module_pickling"),
        *("threads", "wording", "report.report_builder", "report.report_model"),
    },
    "report": {
        *("errors", "urls", "wording", "storage", "checkpoint", "telemetry", "report"),
        "cluster.runs",
    },
    "ui": {
        *("errors", "wording", "storage", "report", "ui"),
        *("cluster.runs", "cluster.ray"),
    },
    "cli": {
        "report",
        "ui",
        "errors",
        "config",
        "data",
        "dataprep",
        "storage",
        "checkpoint",
        "cluster",
        "wording",
        "cli",
    },
    "testing": {
        *(
            "errors",
            "config",
            "coordinator.messages",
            "device",
            "distributed",
            "train",
            "telemetry",
            "cluster",
        ),
        *("threads", "testing"),
    },
    "integrations": {
        "errors",
        "integrations",
        "telemetry.run_logger",
        "__init__",
    },  # as a user's script does
    "__init__": {"config", "train", "cluster", "checkpoint"},
}

PURE = {"errors", "urls", "wording", "config", "coordinator", "sampling"}
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


@pytest.mark.parametrize("path", modules(), ids=lambda p: str(p.relative_to(ROOT)))
def test_a_module_outside_storage_imports_no_library_of_stores(path):
    if part_of(path) != "storage":
        found = {name.split(".")[0] for _, name in imports(path)}
        assert not found & {"fsspec", "obstore", "s3fs", "gcsfs", "adlfs"}


def test_cuda_is_named_in_one_place():
    """Another kind of device, and the simulated one, take the place of these modules."""
    found = [
        f"{path.relative_to(ROOT)}:{number}"
        for path in modules()
        if part_of(path) != "device"
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if re.search(r"\bcuda\b", line)
    ]
    assert not found, f"{found}: put it into elastic_dp/device/"


def test_every_module_says_what_it_does():
    for path in modules():
        tree = ast.parse(path.read_text())
        assert not tree.body or ast.get_docstring(tree), path


def test_no_file_grows_into_a_god():
    for path in modules():
        assert len(path.read_text().splitlines()) <= 500, path


def test_testing_is_imported_by_no_production_code():
    for path in modules():
        if part_of(path) != "testing":
            assert not [name for _, name in imports(path) if name.startswith("elastic_dp.testing")]


def test_no_package_of_the_cluster_is_a_drawer():
    for folder in (ROOT / "cluster", *(ROOT / "cluster").rglob("*/")):
        assert len(list(folder.glob("*.py"))) <= 12, f"{folder}: subpackages name the parts"


def attributes(node):
    """Return the fields of a class, and what its methods set on `self`."""
    found = {n.target.id for n in node.body if isinstance(n, ast.AnnAssign)}
    for each in ast.walk(node):
        if isinstance(each, ast.Attribute) and isinstance(each.ctx, ast.Store):
            found |= {each.attr} if getattr(each.value, "id", "") == "self" else set()
    return found


def test_classes_of_the_cluster_hold_one_story_each():
    for path in (ROOT / "cluster").rglob("*.py"):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef):
                assert len(attributes(node)) <= 18, f"{path.name}: {node.name}"


def test_threads_are_started_where_their_end_is_seen():
    for path in modules():
        if path != ROOT / "threads.py":
            assert "threading.Thread(" not in path.read_text(), f"{path}: see threads.py"


# Methods that change a container: calling one on another part's field is assigning it.
CHANGES = {
    *("add", "append", "appendleft", "clear", "difference_update", "discard", "extend", "insert"),
    *("move_to_end", "pop", "popitem", "popleft", "remove", "setdefault", "update"),
}


def targets_of(node):
    """What a node assigns, deletes, or changes in place."""
    if isinstance(node, ast.Assign | ast.Delete):
        targets = list(node.targets)
    elif isinstance(node, ast.AugAssign | ast.AnnAssign | ast.For | ast.comprehension):
        targets = [node.target]
    elif isinstance(node, ast.withitem) and node.optional_vars is not None:
        targets = [node.optional_vars]
    elif isinstance(node, ast.Call) and getattr(node.func, "attr", None) in CHANGES:
        targets = [node.func.value]
    elif isinstance(node, ast.Call) and getattr(node.func, "id", None) in ("setattr", "delattr"):
        targets = [ast.Attribute(node.args[0], "setattr")]
    else:
        targets = []
    while targets:
        target = targets.pop()
        if isinstance(target, ast.Tuple | ast.List):
            targets += target.elts
        elif isinstance(target, ast.Starred | ast.Subscript):
            targets.append(target.value)
        else:
            yield target


def aliases_of(function):
    """Local names that stand for a field of another part: `members = generation.members`."""
    for node in ast.walk(function):
        if isinstance(node, ast.Assign):
            for target in node.targets:
                pairs = [(target, node.value)]
                if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                    pairs = list(zip(target.elts, node.value.elts, strict=True))
                for name, value in pairs:
                    owner = getattr(value, "value", None)
                    foreign = (
                        isinstance(value, ast.Attribute) and getattr(owner, "id", "") != "self"
                    )
                    if foreign and isinstance(name, ast.Name):
                        yield name.id, ast.unparse(value)


def assigned_fields(tree):
    """(line, text) of each field of an object other than `self` that is assigned, deleted, or
    changed in place, also by a local name for it."""
    for node in ast.walk(tree):
        line = getattr(node, "lineno", 0)
        for target in targets_of(node):
            owner = getattr(target, "value", None)
            if isinstance(target, ast.Attribute) and getattr(owner, "id", "") != "self":
                yield line, ast.unparse(target)
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef):
            aliases = dict(aliases_of(function))
            for node in ast.walk(function):
                changes = isinstance(node, ast.Call | ast.Delete) or any(
                    isinstance(target, ast.Subscript) for target in getattr(node, "targets", ())
                )
                for target in targets_of(node) if changes else ():
                    if isinstance(target, ast.Name) and target.id in aliases:
                        yield getattr(node, "lineno", 0), aliases[target.id]


def coordinator_modules():
    found = sorted((ROOT / "coordinator").rglob("*.py"))
    assert len(found) > 20
    return found


def test_no_part_of_the_coordinator_assigns_a_field_of_another():
    for path in coordinator_modules():
        found = list(assigned_fields(ast.parse(path.read_text())))
        assert not found, f"{path.name}: {found}; add a method to the part that owns the field"


def test_assigned_fields_finds_each_way_to_change_another_part():
    for code in (
        "a.b = 1",
        "a.b += 1",
        "del a.b[0]",
        "x, a.b = 1, 2",
        "a.b.add(1)",
        "self.a.b = 1",
        "x, (y, *a.b) = 1, (2, 3)",
        "with x as a.b: pass",
        "for a.b in x: pass",
        "setattr(a, 'b', 1)",
        "def f(): c = a.b; c.add(1)",
        "def f(): c, d = self.a.b, 1; c[0] = 1",
    ):
        assert list(assigned_fields(ast.parse(code))), code
    for code in (
        "self.b = 1",
        "b = a.b",
        "self.b.add(1)",
        "a.b(1)",
        "rows[0] = 1",
        "def f(): c = self.b; c.add(1)",
    ):
        assert not list(assigned_fields(ast.parse(code))), code


def test_the_phase_of_a_run_changes_in_one_file_and_as_its_table_says():
    for path in coordinator_modules():
        for node in ast.walk(ast.parse(path.read_text())):
            targets = getattr(node, "targets", [getattr(node, "target", None)])
            phase = any(getattr(target, "attr", "") == "phase" for target in targets)
            assert not phase or path.name == "phases.py", f"{path.name}:{node.lineno}"
    reached = {Phase.GATHERING, *TABLE.values()}
    assert reached == set(Phase)
    assert {transition for _, transition in TABLE} == set(Transition)
    for phase in Phase:
        for transition in Transition:
            machine = PhaseMachine(phase)
            if (phase, transition) in TABLE:
                machine.apply(transition)
                assert machine.phase is TABLE[phase, transition]
            else:
                with pytest.raises(IllegalTransition, match=str(transition)):
                    machine.apply(transition)


def test_module_and_class_names_appear_once_in_the_package():
    """A name that appears twice sends a reader to the wrong file."""
    stems, classes = Counter(), Counter()
    for path in modules():
        if not path.stem.startswith("__"):
            stems[path.stem] += 1
        tree = ast.parse(path.read_text())
        classes.update(node.name for node in tree.body if isinstance(node, ast.ClassDef))
    assert len(stems) > 150 and len(classes) > 200
    assert [name for names in (stems, classes) for name, n in names.items() if n > 1] == []


# What users' scripts depend on. A name may be added; none is renamed, taken away, or moved to
# another place.
PARAMETERS = {
    "ElasticTrainer": """
        train *data name storage_path config scaling checkpoint failure exact max_steps
        max_time_s loggers labels runtime_env storage_options
    """,
    "ElasticTrainer.fit": "self local",
    "attach": "name storage_path storage_options",
    "TrainContext.steps": "self model optimizer loss_fn *scheduler clip_norm precision state",
    "TrainContext.evaluate": "self fn data *model",
    "TrainContext.log": "self metrics",
    "TrainContext.stop": "self reason",
    "TrainContext.checkpoint": "self metrics",
    "DataConfig": """
        url *micro_batch_size epochs seed tail format csv_options source_column columns filter
        pack decode transform collate_fn workers shuffle memory_bytes on_bad_shard max_bad_fraction
        fill_nulls storage_options
    """,
    "MapStyleData": """
        dataset *micro_batch_size epochs seed tail workers collate_fn shuffle fingerprint
    """,
    "ScalingConfig": """
        *min_workers max_workers virtual_workers standby resources_per_worker threads_per_worker
        stabilization_s market min_on_demand zones label_selector balance
    """,
    "CheckpointConfig": """
        *every_steps every_s every num_to_keep keep_every checkpoint_score_attribute
        checkpoint_score_order
    """,
    "FailureConfig": """
        *heartbeat_timeout_s lease_s forming_timeout_s hang_timeout_s release_timeout_s
        compare_weights_every max_losses_without_progress max_losses_of_micro_batch
        max_out_of_memory max_user_errors storage_timeout_s run_lease_s orphan_timeout_s
    """,
}
MEMBERS = {
    "TrainContext": "checkpoint config device evaluate generation is_source log rank seed steps "
    "steps_per_epoch stop "
    "total_steps world_size",
    "Run": "checkpoint drain events interrupted logs pids result scale status stop",
    "Step": "number epoch epoch_end loss weight metrics grad_norm lr",
}


def test_public_names_are_exactly_these():
    names = (
        "CheckpointConfig DataConfig ElasticTrainer FailureConfig MapStyleData Result Run "
        "ScalingConfig Step TrainContext "
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


# A failing line in CI is all that many see of a test: its name begins with what it is about.
VAGUE = {
    *("it", "its", "they", "them", "their", "he", "she", "this", "that", "these", "those", "there"),
    *("who", "whose", "whom", "what", "which", "whoever", "whatever", "one", "other", "others"),
    *("another", "nobody", "nothing", "everybody", "everyone", "everything", "somebody"),
    *("and", "or", "nor", "but", "not", "so", "then", "than", "as", "if", "unless", "because"),
    *("when", "where", "while", "once", "after", "before", "until", "since", "though"),
    *("of", "on", "in", "at", "by", "to", "from", "with", "without", "for", "through", "across"),
    *("below", "past", "under"),
}


def names_of_tests():
    for path in sorted(Path(__file__).parent.rglob("test_*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                yield f"{path.name}::{node.name}", node.name.split("_")[1:]


def test_names_of_tests_begin_with_their_unit_and_say_what_holds():
    names = dict(names_of_tests())
    assert len(names) > 1000
    assert not [name for name, words in names.items() if words[0] in VAGUE]
    assert not [name for name, words in names.items() if len(words) < 3]


def test_files_of_tests_are_short_enough_to_read():
    """Tables are left out: each of their entries is read alone."""
    tables = {"mutants.py", "zoo.py", "habits.py", "mutations.py"}
    long = {
        str(path.relative_to(ROOT.parent)): lines
        for path in (ROOT.parent / "tests").rglob("*.py")
        if path.name not in tables and (lines := len(path.read_text().splitlines())) > 750
    }
    assert not long

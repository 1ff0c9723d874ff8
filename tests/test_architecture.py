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
from tests.source_trees import tree_of

ROOT = Path(__file__).parent.parent / "elastic_dp"

# Who may import what of ours; `coordinator.messages` is the language everybody speaks.
ALLOWED = {
    "errors": set(),
    "run_record": {"errors", "config", "storage", "checkpoint", "data"},
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
    "materialization": {"errors", "config", "storage", "data", "dataprep", "materialization"},
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
        *("threads", "wording", "run_record", "report.report_builder", "report.report_model"),
        "materialization.materialized_rows",
    },
    "report": {
        *("errors", "urls", "wording", "storage", "checkpoint", "telemetry", "report"),
        "run_record",
    },
    "ui": {
        *("errors", "wording", "storage", "report", "run_record", "ui"),
        *("cluster.runs", "cluster.ray"),
    },
    "cli": {
        "report",
        "urls",
        "ui",
        "errors",
        "config",
        "data",
        "dataprep",
        "storage",
        "checkpoint",
        "cluster",
        "run_record",
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
        *("threads", "run_record", "module_pickling", "testing"),
    },
    "integrations": {
        "errors",
        "integrations",
        "module_pickling",
        "telemetry.run_logger",
        "wording",
        "__init__",
    },  # as a user's script does
    "__init__": {"config", "train", "cluster", "checkpoint", "run_record"},
}

# What a pure part may import beside our own: of the standard library what reads no clock, draws no
# random number, and does no I/O.
PURE_MODULES = {
    *("__future__", "bisect", "codecs", "collections", "dataclasses", "difflib", "enum"),
    *("fractions", "functools", "heapq", "itertools", "json", "math", "re", "statistics"),
    *("typing", "zlib"),
}
PURE = {part: PURE_MODULES for part in ("errors", "urls", "wording", "config", "coordinator")}
# The order of millions of rows is arithmetic on arrays, so sampling needs numpy, and only for that:
# its random numbers come from keys, see `test_sampling_draws_random_numbers_from_keys_alone`.
PURE["sampling"] = PURE_MODULES | {"numpy"}
NEVER_IN_STORAGE = {"torch", "ray", "numpy", "pyarrow"}  # it moves bytes
BANNED_NAMES = {"utils", "common", "core", "helpers", "base", "manager", "misc", "types"}


def modules():
    return sorted(ROOT.rglob("*.py"))


def imports(path):
    """(line, dotted name) of everything that `path` imports, also inside functions."""
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield node.lineno, node.module


def part_of(path):
    inner = path.relative_to(ROOT)
    return inner.parts[0] if len(inner.parts) > 1 else inner.stem


def may_import(part, name):
    pieces = name.split(".")
    if pieces[0] == "elastic_dp":
        allowed = ALLOWED[part]
        ours = pieces[1] if len(pieces) > 1 else "__init__"
        return ours in allowed or ".".join(pieces[1:3]) in allowed or ours == "errors"
    if pieces[0] == "ray":
        return part == "cluster"
    if part in PURE:
        return pieces[0] in PURE[part]
    return part != "storage" or pieces[0] not in NEVER_IN_STORAGE


def test_imports_point_inward():
    assert not [
        f"{path.relative_to(ROOT)}:{line} imports {name}"
        for path in modules()
        for line, name in imports(path)
        if not may_import(part_of(path), name)
    ]


def test_no_module_has_a_name_that_means_nothing():
    assert not [path for path in modules() if path.stem in BANNED_NAMES]


def test_a_module_outside_storage_imports_no_library_of_stores():
    libraries = {"fsspec", "obstore", "s3fs", "gcsfs", "adlfs"}
    assert not [
        f"{path.relative_to(ROOT)}:{line} imports {name}"
        for path in modules()
        for line, name in imports(path)
        if part_of(path) != "storage" and name.split(".")[0] in libraries
    ]


def test_modules_that_a_pure_part_may_import_are_of_the_standard_library():
    assert sys.stdlib_module_names > PURE_MODULES
    assert not PURE_MODULES & {
        *("time", "datetime", "random", "secrets", "threading", "asyncio", "socket", "os", "io"),
        *("logging", "subprocess", "pathlib", "sys", "uuid", "tempfile"),
    }


def test_sampling_draws_random_numbers_from_keys_alone():
    """The module makes one generator, for user code, whose stream is a function of its key."""
    text = "".join(path.read_text() for path in (ROOT / "sampling").glob("*.py"))
    assert set(re.findall(r"\brandom\.\w+", text)) == {"random.Generator", "random.Philox"}
    assert text.count("Philox(") == text.count("Philox(key=key)") == 1


def circles(edges):
    """The parts that can be reached from themselves, by `edges` (part -> parts it imports)."""
    reached = {part: set(direct) for part, direct in edges.items()}
    for _ in edges:
        for part in edges:
            reached[part] |= set().union(*(reached.get(other, set()) for other in reached[part]))
    return sorted(part for part in edges if part in reached[part])


def test_packages_import_each_other_in_no_circle():
    """Also inside functions, and where a type checker alone imports."""
    edges = {}
    for path in modules():
        part = part_of(path)
        if part != "__init__":  # the public names, from everywhere
            ours = [name.split(".") for _, name in imports(path) if name.startswith("elastic_dp.")]
            edges.setdefault(part, set()).update(name[1] for name in ours if name[1] != part)
    assert len(edges) > 15 and "storage" in edges["checkpoint"]
    assert circles(edges) == []


def test_circles_finds_short_and_long_ones():
    assert circles({"a": {"b"}, "b": {"c"}, "c": set()}) == []
    assert circles({"a": {"b"}, "b": {"a"}, "c": {"a"}}) == ["a", "b"]
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"d"}, "d": {"b"}}) == ["b", "c", "d"]


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
        tree = tree_of(path)
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
        for node in tree_of(path).body:
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
        found = list(assigned_fields(tree_of(path)))
        assert not found, f"{path.name}: {found}; add a method to the part that owns the field"


# Packages whose modules assign only fields that a class of the same module declares.
OWNED = ("checkpoint", "cluster", "data", "distributed", "report", "sampling", "telemetry", "train")
# Fields of objects that are not ours, which bear the name of one of our fields.
NOT_OURS = {
    "checkpoint/python_objects/restore.py": {"mine.state", "mine.bit_generator.state"},  # numpy's
    "data/discovery/index.py": {"scan.schema"},  # Arrow's `append` returns another schema
    "data/formats/tar.py": {"members.members"},  # tarfile's
    "distributed/process_group.py": {"options._timeout"},  # torch's, as those below
    "train/inner_moments.py": {"optimizer.state"},
    "train/master_weights.py": {"inner.state"},
    "train/sharding/piece_updates.py": {"inner.state"},
    "train/sharding/sharded_optimizer.py": {"self._optimizer.state"},
    "train/state/buffer_memory.py": {"tensor.data", "slot.module._buffers"},
    "train/state/optimizer_state.py": {"one.state", "self.outer.state"},
    "train/state/previous_step.py": {"module.training"},
    "train/state/train_state.py": {"module.training"},
    "train/step/evaluation.py": {"module.training"},
    "train/step/inner_steps.py": {"optimizer.state"},
}


def declared_fields(tree):
    """What the classes of a module declare, or set on `self`."""
    classes = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    return set().union(*(attributes(node) for node in classes))


def foreign_assignments(trees):
    """(path, line, text) of each field that a module assigns and a class of another declares."""
    declared = {path: declared_fields(tree) for path, tree in trees.items()}
    anywhere = set().union(*declared.values())
    for path, tree in trees.items():
        for line, text in assigned_fields(tree):
            if text.rpartition(".")[2] in anywhere - declared[path]:
                yield path, line, text


def test_no_module_assigns_a_field_that_another_declares():
    trees = {str(path.relative_to(ROOT)): tree_of(path) for path in modules()}
    found = list(foreign_assignments(trees))
    unknown = [
        f"{path}:{line} {text}"
        for path, line, text in found
        if path.split("/")[0] in OWNED and text not in NOT_OURS.get(path, set())
    ]
    assert not unknown, "add a method to the class that owns the field"
    stale = {(path, text) for path, texts in NOT_OURS.items() for text in texts}
    assert stale <= {(path, text) for path, _, text in found}


def test_foreign_assignments_finds_fields_of_other_modules_alone():
    declares = ast.parse("class A:\n    x: int\n    def __init__(self): self.y = 1")
    assigns = "class B:\n    z: int\ndef f(a, b): {}"
    for code, expected in (
        ("a.x = 1", ["a.x"]),
        ("a.y.append(1)", ["a.y"]),
        ("b.z = 1", []),
        ("a.unknown = 1", []),
    ):
        trees = {"one": declares, "two": ast.parse(assigns.format(code))}
        assert [text for _, _, text in foreign_assignments(trees)] == expected, code


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


def changes_of_phase(tree):
    """Lines that assign a phase by any kind of target, make a machine that holds one, or assign
    the field that holds the machine of a run."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "PhaseMachine":
            yield node.lineno
        for target in targets_of(node):
            if getattr(target, "attr", "") in {"phase", "_phase", "_machine", "setattr"}:
                yield node.lineno


def test_changes_of_phase_finds_each_way():
    for code in (
        "a.phase = 1",
        "a.b, self.phase = 1, 2",
        "for self.phase in a: pass",
        "self._machine = other",
        "x = PhaseMachine(Phase.OVER)",
        "a, self._machine = 1, other",
        "setattr(self, 'phase', 1)",
    ):
        assert list(changes_of_phase(ast.parse(code))), code
    assert not list(changes_of_phase(ast.parse("x = self.phase; self._machine.apply(a)")))


def test_the_phase_of_a_run_changes_in_one_file_and_as_its_table_says():
    lines = {path.name: sorted(changes_of_phase(tree_of(path))) for path in coordinator_modules()}
    assert lines.pop("phases.py")
    state = lines.pop("run_state.py")
    assert len(set(state)) == 1, "a run makes its machine once"
    assert not any(lines.values()), lines
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
    """A name that appears twice sends a reader to the wrong file. A package may hold a module of
    its own name, which is where it begins."""
    names, classes = Counter(), Counter()
    for path in modules():
        if path.stem == "__init__":
            names[path.parent.name] += 1
        elif not path.stem.startswith("__") and path.stem != path.parent.name:
            names[path.stem] += 1
        tree = tree_of(path)  # also nested ones
        classes.update(node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef))
    assert len(names) > 200 and len(classes) > 300
    assert [name for found in (names, classes) for name, n in found.items() if n > 1] == []


# What users' scripts depend on. A name may be added; none is renamed, taken away, or moved to
# another place.
PARAMETERS = {
    "ElasticTrainer": """
        train *data name storage_path config scaling checkpoint failure exact sharding wire
        comm_hook staleness inner_steps max_steps max_time_s loggers labels runtime_env
        storage_options
    """,
    "ElasticTrainer.fit": "self local",
    "attach": "name storage_path storage_options",
    "TrainContext.steps": """
        self model optimizer loss_fn *scheduler clip_norm precision state noise_scale_every
        inner_optimizer inner_clip_norm
    """,
    "TrainContext.inner_steps_before": "self step",
    "batch_lr": "batch *base rule warmup_steps",
    "NoiseScale": "*decay",
    "TrainContext.evaluate": "self fn data *model",
    "TrainContext.log": "self metrics",
    "TrainContext.stop": "self reason",
    "TrainContext.checkpoint": "self metrics",
    "DataConfig": """
        url *micro_batch_size epochs seed tail format csv_options source_column source_options
        columns filter pack pack_columns group_by_length decode transform collate_fn workers shuffle
        memory_bytes cache_dir cache_bytes on_bad_shard max_bad_fraction fill_nulls storage_options
    """,
    "MapStyleData": """
        dataset *micro_batch_size epochs seed tail workers collate_fn shuffle fingerprint
    """,
    "IterableData": """
        dataset *micro_batch_size epochs seed tail fingerprint max_rows folder pack group_by_length
        decode transform collate_fn workers shuffle memory_bytes fill_nulls storage_options
    """,
    "ScalingConfig": """
        *min_workers max_workers virtual_workers standby warm_processes resources_per_worker
        processes_per_worker tensor_parallel_size context_parallel_size threads_per_worker
        stabilization_s market min_on_demand zones label_selector balance priority
    """,
    "CheckpointConfig": """
        *every_steps every_s every num_to_keep keep_every checkpoint_score_attribute
        checkpoint_score_order
    """,
    "PowerSGDConfig": """
        *matrix_approximation_rank start_powerSGD_iter min_compression_rate use_error_feedback
        warm_start orthogonalization_epsilon batch_tensors_with_same_shape
    """,
    "FailureConfig": """
        *heartbeat_timeout_s heartbeat_interval_s lease_s forming_timeout_s hang_timeout_s
        release_timeout_s
        compare_weights_every max_losses_without_progress max_losses_of_micro_batch
        max_out_of_memory max_user_errors storage_timeout_s run_lease_s orphan_timeout_s
    """,
}
MEMBERS = {
    "TrainContext": "checkpoint config device evaluate generation inner_steps_before is_source log "
    "mesh rank seed steps steps_per_epoch stop "
    "total_steps virtual_workers world_size",
    "Run": "checkpoint drain events interrupted logs pids result scale status stop",
    "Step": "number epoch epoch_end loss weight metrics noise grad_norm lr",
}


def test_public_names_are_exactly_these():
    names = (
        "CheckpointConfig DataConfig ElasticTrainer FailureConfig InnerMoments IterableData "
        "MapStyleData MasterWeights NoiseScale PowerSGDConfig Result Run ScalingConfig Step "
        "TrainContext WeightPrediction attach batch_lr load_state"
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


@pytest.mark.parametrize("name", MEMBERS)
def test_public_members_have_docstrings(name):
    of = getattr(elastic_dp, name)
    assert inspect.getdoc(of)
    missing = []
    for member in MEMBERS[name].split():
        found = inspect.getattr_static(of, member, None)
        if found is not None:  # else set as it is made: the class says what it is
            missing += [] if inspect.getdoc(found) else [member]
        elif member not in inspect.getdoc(of):
            missing.append(member)
    assert not missing


def test_the_command_line_starts_without_torch_and_ray():
    look = "import sys, elastic_dp.cli; print({'torch', 'ray'} & set(sys.modules))"
    command = [sys.executable, "-c", look]
    said = subprocess.run(command, cwd=ROOT.parent, capture_output=True, text=True, check=True)
    assert said.stdout == "set()\n"


def test_a_worker_does_not_import_pandas():
    """`pyarrow.dataset` does, and each worker would hold 50 MB more, and start half a second
    later."""
    modules = "elastic_dp.cluster.worker, elastic_dp.data.datasets.opening"
    look = f"import sys, {modules}; print({{'pandas', 'pyarrow.parquet'}} & set(sys.modules))"
    command = [sys.executable, "-c", look]
    said = subprocess.run(command, cwd=ROOT.parent, capture_output=True, text=True, check=True)
    assert said.stdout == "{'pyarrow.parquet'}\n"


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
        for name in re.findall(r"^ *def (test_\w+)\(", path.read_text(), re.M):
            yield f"{path.name}::{name}", name.split("_")[1:]


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

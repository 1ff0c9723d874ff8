"""The user's modules work in another process as they do here, though its disk has none of them."""

import importlib.machinery
import importlib.util
import os
import pickle
import subprocess
import sys
import textwrap
from types import ModuleType

import pytest

import elastic_dp as edp
from elastic_dp import module_pickling
from elastic_dp.module_pickling import pickle_with_modules

_MODULE = """
    from __future__ import annotations
    import enum, inspect, pickle, typing
    from dataclasses import dataclass
    from ours_by_folder.part import ours  # a package without a file, and one with

    @dataclass
    class Config:
        width: int

    class Kind(enum.Enum):
        A = 1

    def train(ctx): ...

    def found():
        @dataclass
        class Local:
            width: typing.ClassVar[int] = 2
            config: Config
        assert typing.get_type_hints(Config) == {"width": int}
        assert pickle.loads(pickle.dumps([Kind.A, Config(1)])) == [Kind.A, Config(1)]
        assert "width: int" in inspect.getsource(Config)
        return [Local(Config(1)).width, ours()]
"""
_CHILD = """
import pickle, sys
found = pickle.load(sys.stdin.buffer)
print(found(), file=sys.stderr)
from elastic_dp.module_pickling import pickle_with_modules
sys.stdout.buffer.write(pickle_with_modules(found))
"""


@pytest.fixture(autouse=True)
def nothing_of_ours_stays():
    """This fixture comes before `monkeypatch`, which puts back what a test took away, and so ends
    after it."""
    yield
    for name in [name for name in sys.modules if name.startswith("ours_")]:
        del sys.modules[name]


@pytest.fixture
def module(nothing_of_ours_stays, tmp_path, monkeypatch):
    part = tmp_path / "ours_by_folder" / "part"
    part.mkdir(parents=True)
    (part / "__init__.py").write_text("def ours(): return 'as it was sent'")
    (tmp_path / "ours_to_send.py").write_text(textwrap.dedent(_MODULE))
    monkeypatch.syspath_prepend(tmp_path)
    return importlib.import_module("ours_to_send")


def in_another_process(pickled, **environment):
    """What `found` returns there, and it, sent on from there."""
    return subprocess.run(
        [sys.executable, "-c", _CHILD],
        input=pickled,
        capture_output=True,
        env=os.environ | environment,
        check=False,
    )


def test_a_module_of_the_users_own_goes_along_and_further(module):
    first = in_another_process(pickle_with_modules(module.found))
    assert first.stderr.decode().strip() == "[2, 'as it was sent']"
    second = in_another_process(first.stdout)
    assert second.stderr == first.stderr


def test_a_module_of_a_package_that_is_none(module, monkeypatch):
    """pytest makes such modules when it imports a file by its path."""
    for name in ("ours_nowhere", "ours_nowhere.inner"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    spec = importlib.util.spec_from_file_location("ours_nowhere.inner.job", module.__file__)
    job = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, job)
    spec.loader.exec_module(job)
    there = in_another_process(pickle_with_modules(job.found))
    assert there.stderr.decode().strip() == "[2, 'as it was sent']"


def test_a_file_that_was_edited_since_is_not_what_runs(module, tmp_path):
    pickled = pickle_with_modules(module.found)
    (tmp_path / "ours_to_send.py").write_text("found = broken")
    (tmp_path / "ours_by_folder" / "part" / "__init__.py").write_text("def ours(): return 'edited'")
    there = in_another_process(pickled, PYTHONPATH=f"{tmp_path}{os.pathsep}{os.getcwd()}")
    assert there.stderr.decode().strip() == "[2, 'as it was sent']"


def test_a_job_goes_with_the_modules_of_its_train_function(module, monkeypatch):
    data = edp.MapStyleData([1, 2], micro_batch_size=1)
    pickled = edp.ElasticTrainer(module.train, name="n", data=data, max_steps=1)._pickle()
    monkeypatch.setattr(module_pickling._finder, "modules", {})
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p != os.path.dirname(module.__file__)])
    monkeypatch.delitem(sys.modules, module.__name__)
    _, train = pickle.loads(pickled)
    assert train.__module__ == module.__name__ and train is not module.train


def test_a_package_with_a_compiled_part_is_left_to_the_others_disk(module, monkeypatch):
    """Such a package was installed beside the project: its sources are not all of it."""
    compiled = ModuleType("ours_by_folder.fast")
    compiled.__loader__ = importlib.machinery.ExtensionFileLoader(compiled.__name__, "fast.so")
    monkeypatch.setitem(sys.modules, compiled.__name__, compiled)
    sent = {name for name in module_pickling._own_modules() if name.startswith("ours_")}
    assert sent == {"ours_to_send"}


def test_module_that_is_imported_already_stays(module):
    assert pickle.loads(pickle_with_modules(module.found)) is module.found
    assert (
        importlib.import_module("ours_by_folder.part").__loader__.__module__
        != "elastic_dp.module_pickling"
    )


def test_code_that_is_sent_by_value_keeps_the_name_of_its_file():
    def outer():
        def inner():
            return 1

        return inner

    received = pickle.loads(pickle_with_modules(as_of_main(outer)))
    assert received is not outer
    assert received.__code__.co_filename == received().__code__.co_filename == __file__
    assert received().__code__.co_firstlineno == outer().__code__.co_firstlineno


def as_of_main(function):
    """Return the function as if it were defined in `__main__`, and so sent by value."""
    function.__module__ = "__main__"
    return function

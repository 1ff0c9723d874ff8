"""What the tests and the package import is named in pyproject.toml, so that `make install` brings
it."""

import re
import sys
import tomllib
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from tests.conftest import LONG
from tests.source_trees import sources

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
OURS = {"elastic_dp", "tests", "jobs", "benchmarks", "docs"}
# For the type checker alone, and torch brings it.
TYPES = {"typing_extensions"}


def names_in(requirements):
    """Return the names of distributions, with the extras of our own that they ask for."""
    for requirement in requirements:
        name = (
            requirement.split("[")[0].split(">")[0].split("=")[0].strip().lower().replace("_", "-")
        )
        if name == PROJECT["name"].replace("_", "-"):
            for extra in requirement.split("[")[1].rstrip("]").split(","):
                yield from names_in(PROJECT["optional-dependencies"][extra.strip()])
        else:
            yield name


def brought_by(name):
    """Return the modules of a distribution, by its list of files."""
    try:
        files = distribution(name).read_text("RECORD") or ""
    except PackageNotFoundError:  # there is none for this platform
        return set()
    return {re.match("[^/.,]*", line)[0] for line in files.splitlines()}


WRITERS = set(ROOT.glob("tests/data/written_by_*/write.py"))  # run once, where they are installed


def test_the_dev_extra_has_what_the_tests_import():
    extras = PROJECT["optional-dependencies"]
    named = {
        *names_in(PROJECT["dependencies"]),
        *names_in(extras["dev"]),
        *names_in(extras["jobs"]),
    }
    known = OURS | TYPES | {*sys.stdlib_module_names}.union(*map(brought_by, named))
    missing = {
        top: str(path.relative_to(ROOT))
        for path, imports in sources().imports.items()
        if path.is_relative_to(ROOT / "tests") or path.is_relative_to(ROOT / "elastic_dp")
        for top in {module.partition(".")[0] for module in imports} - known
        if path not in WRITERS
    }
    assert not missing


SLOW = "accelerate|datasets|lightning|pyiceberg|pytorch_optimizer|torchao|torchmetrics|transformers"


def test_files_of_tests_import_no_library_that_takes_seconds():
    """Each process of the tests imports all of them: see tests/imported_when_used.py."""
    imports = re.compile(rf"^(?:import|from) (?:{SLOW})\b", re.M)
    files = (ROOT / "tests").rglob("test_*.py")
    assert not [file.name for file in files if imports.search(file.read_text())]


def test_torch_is_named_exactly_where_it_is_installed():
    """A looser name pulls several GB of CUDA."""
    assert "torch==2.13.0" in (ROOT / "constraints.txt").read_text().splitlines()
    lines = re.findall(r"^\t.*pip install .*", (ROOT / "Makefile").read_text(), re.M)
    assert len(lines) == 3
    assert "torch==2.13.0" in lines[0]  # the others keep it
    assert all("torch==2.13.0" in line or "-c constraints.txt" in line for line in lines)


def test_files_that_begin_first_exist():
    assert len(LONG) > 5
    for path in LONG:
        assert (ROOT / path).exists(), path

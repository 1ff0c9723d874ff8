"""The wheel, in an environment of its own, trains: nothing is missing from it.

Its dependencies are those of the environment that runs this; tests/test_wheel.py installs them.
"""

import shutil
import site
import sys
import venv
from pathlib import Path

from tests.kit.commands import run

ROOT = Path(__file__).parent.parent
JOB = """
import sys
sys.path.append({jobs!r})
import digits
import elastic_dp.cli
print(elastic_dp.__file__)
trainer = digits.make_trainer(
    name="a", storage_path="runs", data="digits", epochs=None, max_steps={steps}
)
print(trainer.fit(local=True).weights_sha256)
"""
STEPS = 3


def sources(folder):
    """A copy of what the wheel is built from, without what is left of earlier builds."""
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "elastic_dp", folder / "elastic_dp", ignore=ignored)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    return folder


def test_wheel_trains_the_digits_in_an_environment_without_the_checkout(tmp_path):
    (tmp_path / "source").mkdir()
    build = (
        f"from setuptools import build_meta; build_meta.build_wheel({str(tmp_path / 'wheels')!r})"
    )
    run(sys.executable, "-c", build, cwd=sources(tmp_path / "source"))  # as pip calls it
    [wheel] = (tmp_path / "wheels").glob("*.whl")
    shutil.rmtree(tmp_path / "source")
    venv.create(tmp_path / "venv", symlinks=True)
    python = tmp_path / "venv" / "bin" / "python"
    [packages] = (tmp_path / "venv").glob("lib/python*/site-packages")
    shutil.unpack_archive(wheel, packages, "zip")  # tests/test_wheel.py has pip do it
    # A path that a .pth adds comes last, and no .pth in it is read: no editable install is found.
    (packages / "dependencies.pth").write_text("\n".join(site.getsitepackages()))
    script = tmp_path / "job.py"
    script.write_text(JOB.format(jobs=str(ROOT / "jobs"), steps=STEPS))
    where, in_wheel = run(python, script, cwd=tmp_path).splitlines()[-2:]
    assert where == str(packages / "elastic_dp" / "__init__.py")
    assert len(in_wheel) == 64
    listed = [path.name for path in (ROOT / "elastic_dp" / "report" / "assets").iterdir()]
    there = {path.name for path in (packages / "elastic_dp" / "report" / "assets").iterdir()}
    assert listed and set(listed) <= there

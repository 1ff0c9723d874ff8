# The newcomer's commands. Each makes .venv when it is missing or when the packages it needs have changed.
PYTHON ?= python3
export OMP_NUM_THREADS ?= 1
export RAY_USAGE_STATS_ENABLED ?= 0

.PHONY: train test slow mutation chaos kubernetes check docs wheel install

train: .venv/installed
	.venv/bin/python -m jobs.gpt

chaos: .venv/installed
	.venv/bin/python -m benchmarks.chaos

# On the cluster of KUBECONFIG, which must have KubeRay, or on one that KUBE_CLUSTER makes: tests/kubernetes/conftest.py.
# The faults need the latter, and debootstrap and buildah for the image.
kubernetes: .venv/installed
	.venv/bin/python -m pytest -q -m "slow or not slow" tests/kubernetes

# Four processes, since much of the tests' time is waiting. tests/conftest.py says what begins first.
test: .venv/installed
	.venv/bin/python -m pytest -q -n 4 --dist loadfile --no-loadscope-reorder tests

slow: .venv/installed
	.venv/bin/python -m pytest -q -m slow tests

# Not in `make test`: a night, unless MUTANTS chooses.
mutation: .venv/installed
	.venv/bin/mutmut run $(MUTANTS)

check: .venv/installed
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy

docs: .venv/installed
	.venv/bin/mkdocs build --strict

wheel: .venv/installed
	.venv/bin/python -m pytest -q -m slow tests/test_wheel.py

install: .venv/installed

# pip knows where a torch for the CPU alone lies (pip.conf). uv, which keeps what is there, installs
# the other 250 packages in a fraction of pip's time. Nothing is compiled ahead: of 29,000 files most
# are never imported, and Python compiles the others when they are. Where only pip is configured for
# the index, pip installs all.
.venv/installed: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make PYTHON=python3.11 ...")'
	$(PYTHON) -m venv .venv
	.venv/bin/pip install --quiet --no-compile --no-deps --disable-pip-version-check torch==2.13.0 uv
	.venv/bin/uv pip install --quiet --python .venv/bin/python -c constraints.txt -e '.[dev,jobs]' \
	  || .venv/bin/pip install --quiet --no-compile --disable-pip-version-check -c constraints.txt -e '.[dev,jobs]'
	touch .venv/installed

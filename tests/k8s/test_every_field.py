"""Nothing is in a manifest that no test would miss: each field of each overlay is taken away, and
some check must fail.

    python -m pytest -m slow --assert=plain tests/k8s/test_every_field.py

(plain, or pytest writes out the whole manifest for each assertion that fails as it should: ten
times as slow)

It calls the other tests of this folder as functions, with the changed objects in the place of what
kubectl built.
"""

import copy
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.k8s import (
    manifests,
    test_clouds,
    test_fits,
    test_machines,
    test_names,
    test_policy,
    test_schemas,
)
from tests.k8s.fields import broken

IDENTITY = {"apiVersion", "kind"}


@pytest.mark.slow
@pytest.mark.parametrize("folder", manifests.OVERLAYS)
def test_a_field_that_is_taken_away_is_missed(folder, monkeypatch):
    built, checks = manifests._built, list(_checks(folder, monkeypatch))
    whole, now = built(folder), []
    monkeypatch.setattr(manifests, "_built", lambda asked: now if asked == folder else built(asked))
    kept = []
    for path in _paths(whole):
        now[:] = copy.deepcopy(whole)
        _take_away(now, path)
        if not _is_broken(now) and not any(_fails(check) for check in checks):
            kept.append(".".join(map(str, [whole[path[0]]["kind"], *path[1:]])))
    assert not kept, "\n".join(kept)


def _checks(folder: str, patch: pytest.MonkeyPatch) -> Iterator[Callable[[], Any]]:
    """The tests that need a folder at most. What fails for the whole manifest is no test of this
    folder, nor is what does not look at it."""
    built, looked = manifests._built, set()
    patch.setattr(manifests, "_built", lambda asked: looked.add(asked) or built(asked))
    for module in (test_clouds, test_fits, test_machines, test_names, test_policy, test_schemas):
        for name, test in vars(module).items():
            if not name.startswith("test_"):
                continue
            wants = list(inspect.signature(test).parameters)
            if wants in ([], ["folder"]):
                check = (lambda t: lambda: t(folder))(test) if wants else test
                looked.clear()
                if not _fails(check) and folder in looked:
                    yield check


def _is_broken(objects: list) -> bool:
    """Most are found here. (No assert: pytest would write out all of it each time.)"""
    try:
        return bool(broken(objects))
    except Exception:  # what is looked through is not there
        return True


def _fails(check: Callable[[], Any]) -> bool:
    try:
        check()
    except Exception:  # a KeyError tells as well as an AssertionError that something is not there
        return True
    return False


def _paths(value: Any, path: tuple = ()) -> Iterator[tuple]:
    """Return the paths of everything inside of each object."""
    inside = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list)
        else ()
    )
    for key, below in inside:
        if len(path) >= 1 and not (len(path) == 1 and key in IDENTITY):
            yield (*path, key)
        yield from _paths(below, (*path, key))


def _take_away(objects: Any, path: tuple) -> None:
    holder = objects
    for step in path[:-1]:
        holder = holder[step]
    del holder[path[-1]]

"""Messages count as English does, and identifiers use the field's words."""

import re

from elastic_dp.coordinator import messages as m
from elastic_dp.wording import SHOWN, counted, first_few
from tests.coordinator.scenarios import Scenario
from tests.source_trees import sources


def test_counted_one_is_singular_and_zero_is_plural() -> None:
    assert [counted(n, "worker") for n in (0, 1, 2)] == ["0 workers", "1 worker", "2 workers"]
    assert counted(1, "loss", "losses") == "1 loss" and counted(2, "loss", "losses") == "2 losses"


def test_first_few_words_end_with_an_ellipsis_only_if_there_are_more() -> None:
    workers = [f"w{n}" for n in range(1, SHOWN + 2)]
    assert first_few(workers[:SHOWN]) == ", ".join(workers[:SHOWN])
    assert first_few(iter(workers)) == ", ".join(workers[:SHOWN]) + " …"


def test_a_run_of_one_worker_says_worker_and_never_workers() -> None:
    scenario = Scenario(size=1)
    scenario.running("w1", step=1)
    said = [command.text for command in scenario.ever(m.Explain)]
    assert any("1 worker" in text for text in said) and not any(
        "1 workers" in text for text in said
    )


OLD_WORDS = {  # a word that this project once coined, and the one that the field has for it
    "anew": "again",
    "bereft": "without state",
    "careful": "sequential",
    "checker": "invariant",
    "climate": "fault profile",
    "disagreement": "replica mismatch",
    "fleet": "worker group",
    "founded": "lineage",
    "founder": "initial source",
    "gathering": "membership planner, batch assembler",
    "ghost": "unconfirmed dead",
    "keeping": "drain checkpointer",
    "leaver": "departing, drained",
    "ledger": "run record",
    "linger": "serve until released",
    "mend": "fix",
    "mended": "fixed",
    "objection": "violation",
    "parcel": "payload",
    "portion": "chunk",
    "pulse": "heartbeat sidecar",
    "roster": "worker registry",
    "scene": "scenario",
    "seal": "commit",
    "sealed": "committed",
    "sealer": "committer",
    "seat": "member",
    "seated": "assigned",
    "seating": "assignment",
    "staff": "worker registry",
    "standing": "heartbeat progress",
    "surveyed": "taken over",
    "untouched": "loop body guard",
    "void": "needs state",
    "weather": "fault schedule, spot traces",
}
# Identifiers in which such a word means something else: a phase, an all-gather, numpy.void.
OTHER_MEANINGS = {"GATHERING", "_gathering", "void"}
FRAGMENT = re.compile(r"(Of|As|It|Its|They|Their|Else|Until|So that|But|Whom)\b")


def words_of(identifier: str) -> list[str]:
    parts = re.sub(r"([a-z0-9])([A-Z])", r"\1_\2", identifier).lower().split("_")
    return [part if part in OLD_WORDS else part.removesuffix("s") for part in parts]


def test_docstrings_begin_with_no_pronoun_and_no_fragment() -> None:
    """A docstring begins with a subject or a verb; "Of one member." is a fragment."""
    docstrings = sources().docstrings.items()
    found = [f"{where}: {text}" for text, where in docstrings if FRAGMENT.match(text)]
    assert not found, "\n".join(found)


def test_identifiers_have_none_of_the_old_words() -> None:
    found = [
        f"{where} {name}: {word} is called {OLD_WORDS[word]}"
        for name, where in sources().names.items()
        for word in words_of(name)
        if word in OLD_WORDS and name not in OTHER_MEANINGS
    ]
    assert not found, "\n".join(found)

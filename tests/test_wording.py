"""Messages count as English does, and identifiers use the field's words."""

from elastic_dp.wording import SHOWN, counted, first_few


def test_counted_one_is_singular_and_zero_is_plural() -> None:
    assert [counted(n, "worker") for n in (0, 1, 2)] == ["0 workers", "1 worker", "2 workers"]
    assert counted(1, "loss", "losses") == "1 loss" and counted(2, "loss", "losses") == "2 losses"


def test_first_few_words_end_with_an_ellipsis_only_if_there_are_more() -> None:
    workers = [f"w{n}" for n in range(1, SHOWN + 2)]
    assert first_few(workers[:SHOWN]) == ", ".join(workers[:SHOWN])
    assert first_few(iter(workers)) == ", ".join(workers[:SHOWN]) + " …"

"""Four thousand runs of the simulator, each another cluster with other weather."""

from collections import Counter

import pytest

from tests.simulation.world import World

SEEDS, CHUNKS = 4000, 40


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_every_promise_holds_in_any_weather(chunk: int) -> None:
    marks: Counter[str] = Counter()
    for seed in range(chunk * SEEDS // CHUNKS, (chunk + 1) * SEEDS // CHUNKS):
        try:
            marks += World(seed).run().marks
        except Exception as error:
            pytest.fail(f"{error}\nreplay: python -m tests.simulation --seed {seed}")
    for seen in ("commit", "hand-over"):  # the weather is not so bad that nothing happens
        assert marks[seen] > SEEDS // CHUNKS / 4, marks


def test_a_seed_replays_to_the_same_trace() -> None:
    def trace(seed: int) -> list[str]:
        lines: list[str] = []
        World(seed, talk=lines.append).run()
        return lines

    assert trace(7) == trace(7)
    assert trace(7) != trace(8)

"""When a resize is worth its pause: by numbers, in a run, and on traces beside always and never."""

import math
import random
from collections.abc import Callable

import pytest

from benchmarks.weather import published
from elastic_dp.coordinator import messages as m
from elastic_dp.coordinator.coordinator_config import CoordinatorConfig
from elastic_dp.coordinator.resizing import MOST, ResizeHistory, ResizeOutlook, join_at, speed
from tests.coordinator.scenes import Scene

RULES = CoordinatorConfig(size=8, virtual_workers=32, stabilization_s=5.0)


def outlook(**more: float) -> ResizeOutlook:
    known = {"present": 4, "free": 4, "ready": 4, "ready_since": 100.0, "joined_at": 0.0}
    return ResizeOutlook(**({"building": False, "pause_s": 0.0, "between_s": 10.0} | known | more))  # type: ignore[arg-type]


def test_at_once_where_nothing_was_measured_or_little_is_lost() -> None:
    assert join_at(outlook(), RULES) == (100.0, "all seats are taken")
    assert join_at(outlook(pause_s=9.0), RULES)[0] == 100.0, "twice as fast: it pays after 9 s"
    assert join_at(outlook(pause_s=500.0, between_s=math.inf), RULES)[0] == 100.0


def test_where_the_group_changes_anyhow_before_it_pays_they_wait_until_waiting_cost_as_much() -> (
    None
):
    at, why = join_at(outlook(pause_s=20.0), RULES)
    assert at == 120.0
    assert why == "a resize stops all for 20 s, pays after 20 s, and the group changes every 10 s"
    assert join_at(outlook(pause_s=20.0, ready=1), RULES)[0] == pytest.approx(
        100.0 + 20.0 / 0.1428, 0.01
    )


def test_who_makes_no_step_shorter_waits_longer_but_not_for_ever() -> None:
    assert speed(7, 8) == speed(4, 8) < speed(8, 8)
    rules = CoordinatorConfig(size=8, virtual_workers=8)
    assert join_at(outlook(present=5, free=3, ready=2, pause_s=2.0), rules)[0] == 100.0 + 2.0 * MOST


def test_a_burst_is_waited_for_whatever_a_resize_costs() -> None:
    assert join_at(outlook(ready=2, joined_at=98.0), RULES) == (103.0, "others may come soon")
    assert join_at(outlook(ready=2, building=True), RULES)[0] == 105.0
    assert join_at(outlook(ready=0), RULES)[0] == join_at(outlook(free=0), RULES)[0] == math.inf


def test_what_a_join_costs_is_measured_in_steps_that_were_not_made() -> None:
    known = ResizeHistory()
    known.changes(0.0, math.inf, 0, joins=False)
    known.steps(0, 3.0)
    known.steps(1, 10.0)
    known.changes(30.0, 30.0, 201, joins=True)  # ten a second
    known.steps(201, 30.5)
    known.steps(231, 35.0)
    known.steps(999, 99.0)
    assert known.pause_s == pytest.approx(2.0)
    known.changes(60.0, 60.0, 1000, joins=False)
    known.steps(1001, 90.0)
    assert known.pause_s == pytest.approx(2.0), "not a join"
    assert known.between_s(80.0) == 40.0


def test_in_a_run_those_who_are_ready_wait_when_resizes_are_dear_and_it_is_said() -> None:
    scene = Scene(
        size=8, virtual_workers=8, hang_timeout_s=1e6, heartbeat_timeout_s=1e5, lease_s=1e6
    )
    scene.running("w1", "w2")
    names = ["w1", "w2"]
    for number in (3, 4, 5):
        step = 100 * number
        for _ in range(2):  # ten steps a second
            step += 10
            scene.hear(*names, step=step)
            scene.now += 1.0
        step += 10
        scene.hear(*names, step=step)
        scene.ready(f"w{number}")
        scene.wait(0.1)
        assert scene.coordinator.phase == ("running" if number == 5 else "ending")
        if number < 5:
            for worker in names:
                scene.stopped(worker, step=step)
            scene.now += 30.0
            names.append(f"w{number}")
            scene.hear(*names, step=step + 1)
    waits = [c.text for c in scene.ever(m.Explain) if "worker waits" in c.text]
    assert (
        len(waits) == 1
        and "1 worker waits for up to 3e+02 s: a resize stops all for 30" in waits[0]
    )
    scene.wait(MOST * 30.0, *names, step=step)
    assert scene.coordinator.phase == "ending", "not for ever"


# ---------------------------------------------------------------------------- on traces


Trace = list[tuple[float, int]]  # when a place came (+1) or went (-1)
PLACES, SPAN_S = 8, 3600.0


def weather(seed: int, stays_s: float, away_s: float) -> Trace:
    """Each place comes and goes by itself."""
    rng, trace = random.Random(seed), []
    for _ in range(PLACES):
        at = rng.expovariate(1.0 / stays_s)
        while at < SPAN_S:
            back = at + rng.expovariate(1.0 / away_s)
            trace += [(at, -1), (back, 1)]
            at = back + rng.expovariate(1.0 / stays_s)
    return sorted(trace)


def bursts(seed: int) -> Trace:
    """Most of a zone goes within seconds, and comes back within seconds."""
    rng, trace, at = random.Random(seed), [], 0.0
    while at < SPAN_S:
        at += rng.expovariate(1.0 / 300.0)
        back, places = at + 3.0 + rng.expovariate(1.0 / 60.0), rng.randint(1, PLACES - 1)
        for _ in range(places):
            trace += [(at + 3.0 * rng.random(), -1), (back + 6.0 * rng.random(), 1)]
        at = back + 6.0
    return sorted(trace)


def night(seed: int) -> Trace:
    """Half of the places in daytime, all of them at night; by day those flap."""
    rng, trace, up = random.Random(seed), [], PLACES
    for minute in range(int(SPAN_S / 60.0)):
        wanted = PLACES if minute // 15 % 2 else rng.randint(PLACES // 2, PLACES)
        change = 1 if wanted > up else -1
        trace += [(60.0 * minute + rng.random(), change) for _ in range(abs(wanted - up))]
        up = wanted
    return sorted(trace)


def recorded(seed: int) -> Trace:
    """A day of AWS's (`weather.G4DN`), seventeen hours in one."""
    spans = [places for _, _, places in published(SPAN_S, PLACES).spans]
    changes = published(SPAN_S, PLACES).changes[1:]
    return [
        (at, 1 if now > before else -1)
        for before, (at, now) in zip(spans, changes, strict=False)
        for _ in range(abs(now - before))
    ]


TRACES: dict[str, Callable[[int], Trace]] = {
    "calm": lambda seed: weather(seed, 3600.0, 120.0),
    "rough": lambda seed: weather(seed, 600.0, 60.0),
    "storm": lambda seed: weather(seed, 120.0, 60.0),
    "bursts": bursts,
    "night": night,
    "recorded": recorded,
}


class Replay:
    """A group on a trace. Whoever comes waits until `policy` lets it in, or a loss forms the group anew anyhow."""

    def __init__(self, trace: Trace, policy: str, pause_s: float, virtual: int) -> None:
        self.trace, self.policy, self.pause_s, self.virtual = trace, policy, pause_s, virtual
        self.rules = CoordinatorConfig(size=PLACES, virtual_workers=virtual, stabilization_s=5.0)
        self.rng, self.known = random.Random(1), ResizeHistory()
        self.seated, self.ready, self.joined_at = PLACES, list[float](), -math.inf
        self.now = self.paused_until = self.steps = 0.0

    def run(self) -> float:
        """Useful steps, at ten a second of one virtual worker."""
        for at, change in [*self.trace, (SPAN_S, 0)]:
            at = min(at, SPAN_S)
            while (joins_at := max(self.joins_at(), self.now, self.paused_until)) < at:
                self.train_until(joins_at)
                self.form(joins=True)
            self.train_until(at)
            if change > 0:
                self.ready.append(at)
            elif change and self.rng.random() * (self.seated + len(self.ready)) < len(self.ready):
                self.ready.pop()
            elif change:
                self.seated -= 1
                self.form(joins=bool(self.ready) and self.policy != "never")
        return self.steps

    def joins_at(self) -> float:
        if not self.ready or self.seated == PLACES:
            return math.inf
        if self.policy == "always" or not self.seated:
            return self.now
        if self.policy == "never":
            return math.inf
        seen = ResizeOutlook(
            present=self.seated,
            free=PLACES - self.seated,
            ready=len(self.ready),
            ready_since=self.ready[0],
            building=False,
            joined_at=self.joined_at,
            pause_s=self.known.pause_s,
            between_s=self.known.between_s(self.now),
        )
        return join_at(seen, self.rules)[0]

    def form(self, joins: bool) -> None:
        self.known.changes(self.now, self.now, int(self.steps), joins)
        if joins:
            self.seated, self.ready, self.joined_at = self.seated + len(self.ready), [], self.now
        self.paused_until = self.now + (self.pause_s if joins else min(self.pause_s, 0.2))

    def train_until(self, at: float) -> None:
        begin = max(self.now, self.paused_until)
        if self.seated and at > begin:
            rate = 10.0 * speed(self.seated, self.virtual)
            self.known.steps(int(self.steps) + 1, begin + 1.0 / rate)
            self.steps += rate * (at - begin)
        self.now = at


def useful(kind: str, policy: str, pause_s: float, virtual: int) -> float:
    return sum(Replay(TRACES[kind](seed), policy, pause_s, virtual).run() for seed in range(4))


def test_beside_always_and_never_resizing_on_traces() -> None:
    """A pause of 50 ms is what this system's is with a small state; 5 and 20 s are copies of large ones."""
    beside = {"always": dict[tuple[str, float, int], float](), "never": {}}
    for case in [(k, p, v) for k in TRACES for p in (0.05, 5.0, 20.0) for v in (8, 32)]:
        ours = useful(case[0], "ours", *case[1:])
        for other, gains in beside.items():
            gains[case] = ours / useful(case[0], other, *case[1:])
    assert min(beside["never"].values()) > 1.5
    assert min(beside["always"].values()) > 0.99, "what waiting for a burst may cost"
    for virtual, gain in ((8, 1.3), (32, 1.2)):
        assert beside["always"]["storm", 20.0, virtual] > gain
    assert beside["always"]["rough", 20.0, 8] > 1.05
    for case in (case for case in beside["always"] if case[0] == "recorded"):
        assert abs(beside["always"][case] - 1.0) < 1e-3, "there every resize pays"
        assert beside["never"][case] > 2.0

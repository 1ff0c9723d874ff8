"""How the price of failures grows with the number of workers: 8 to 16,384, beside restart from a
checkpoint and a dropped batch.

    python -m benchmarks.goodput_at_scale             # needs .[bench]; some five minutes
    python -m benchmarks.goodput_at_scale --draw      # only draw what was simulated before
    python -m benchmarks.goodput_at_scale --quick     # 8 and 64 workers, nothing is recorded

The coordinator is the real one, in simulated time, and hears every worker
(`simulated_cluster.py`). What things take was measured by other benchmarks, with at most five
workers, or is published; `assumptions` has each number with its source, and all are printed.

Failures are those of Llama 3: 419 unexpected interruptions in 54 days on 16,384 GPUs, so one for a
GPU in 5.8 years, of four kinds. Each kind is simulated a number of times at random instants of a
step (`ROUNDS`: fewer of the large groups), each time until the group is whole again and for some
minutes more. Its price is the time in which the missing steps would have been made. Goodput is one
minus the mean price of a failure over the time between two, and minus the time that checkpoints
take. So two failures at once are not in it: at 16,384 workers one in three hours meets a recovery
of some minutes.

Standbys are not counted as workers.

The second plot has 17 hours of a spot market (`spot_traces.G4DN`), in which a twelfth of the group
and more comes and goes at once: simulated as they were, relative to the capacity of each instant.

Restart from a checkpoint and the dropped batch are arithmetic on the same failures, with the same
assumptions (`restarted`, `dropped`). The best possible loses what died and the place that is empty
until a new process is there, and nothing else.
"""

from __future__ import annotations

import argparse
import json
import math
import pickle
import random
import statistics
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.report import RESULTS, add_quick, write
from benchmarks.simulated_cluster import (
    MANY,
    MANY_BEAT_S,
    PER_NODE,
    Costs,
    SimulatedCluster,
)
from benchmarks.spot_traces import published
from elastic_dp.coordinator import messages as m

NAME = "goodput_at_scale"
SVG = Path(__file__).parent.parent / "docs" / "assets" / "goodput-at-scale.svg"
ROUNDS = {8: 40, 64: 40, 512: 20, 4096: 2, 16384: 1}  # simulated failures of each kind
STANDBY = PER_NODE
AFTER_S = 600.0  # from one simulated failure to the next, and as much again at random
SPOT_S = 17 * 3600.0
STATE_BYTES = 16e9
DAY_S = 86400.0

# Llama 3, table 5: unexpected interruptions in 54 days on 16,384 GPUs, by what is lost here.
KINDS = {
    "a worker ends": 148 + 72 + 54 + 19 + 17 + 6 + 2,  # GPU, HBM, software, SRAM, processor, …
    "a node ends": 32,  # maintenance
    "a node falls silent": 35 + 7 + 7 + 3 + 3 + 2 + 2 + 2 + 2,  # network, NIC, power, disk, …
    "a bit flips": 6,  # silent data corruption
}
FAILURES = sum(KINDS.values())
GPU_S = 54 * DAY_S * 16384 / FAILURES  # between two failures of one GPU


class Assumption(NamedTuple):
    what: str
    value: float
    unit: str
    source: str


def recorded(name: str) -> Any:
    return json.loads((RESULTS / f"{name}.json").read_text())["results"]


def recorded_heartbeat_s() -> float:
    of_sizes = json.loads((RESULTS / "coordinator_scale.json").read_text())["results"]
    return float(of_sizes[-1]["changes"]["kill and join"]["median_ms"] / 1e3)


def assumptions() -> dict[str, Assumption]:
    kills, join, arrival = recorded("recovery"), recorded("join"), recorded("planned")["changes"]
    save, torchft = recorded("checkpoint"), recorded("recovery_gpt")["4 blocks of width 128"]
    three, five = (kills[f"{n} workers"]["median_pause_in_parts_ms"] for n in (3, 5))
    copy = join["2 to 3 workers, state of 100 MB"]
    copied = copy["copy_rate_to_bare_broadcast"] * copy["bare_broadcast_mb_per_s"] * 1e6
    stall = {who: save["save"][who]["stall_ms"]["median"] / 5e8 for who in ("ours", ASYNC)}
    heard = three["kill_to_last_survivor_stopped"] / 1e3
    grows = "grows with the group as from 3 to 5 workers in"
    return {
        "gpu_s": Assumption(
            "between two failures of one GPU", GPU_S, "s", "Llama 3 (arXiv 2407.21783), table 5"
        ),
        "step_s": Assumption(
            "a step of the full group, computing",
            6 * 405e9 * 16e6 / (16384 * 400e12),
            "s",
            "Llama 3, tables 3 and 4: 405B parameters, 16M tokens, 400 TFLOPS per GPU",
        ),
        "per_worker": Assumption("micro-batches of a worker in a step", 8, "", "an assumption"),
        "state": Assumption(
            "state of the model", STATE_BYTES, "bytes", "ours: 1.3B parameters, fp32, AdamW"
        ),
        "notice_s": Assumption(
            "from a kill until the others stop, in a short step",
            heard,
            "s",
            "benchmarks/recovery.py, 3 workers",
        ),
        "claim_s": Assumption(
            "to claim a generation",
            three["claim_to_announced"] / 1e3,
            "s",
            "benchmarks/recovery.py, 3 workers",
        ),
        "connect_s": Assumption(
            "to connect a group, for each member",
            (five["announced_to_formed"] - three["announced_to_formed"]) / 2e3,
            "s",
            f"{grows} benchmarks/recovery.py; MegaScale (NSDI '24): < 30 s for > 10,000 GPUs",
        ),
        "heartbeat_s": Assumption(
            "a heartbeat, at the coordinator",
            recorded_heartbeat_s(),
            "s",
            "benchmarks/coordinator_scale.py, 10,000 workers",
        ),
        "beat_s": Assumption(
            f"between two heartbeats of a worker, up to {MANY:,} workers",
            1.0,
            "s",
            f"ours; above {MANY_BEAT_S:g} s; the timeout is 5 of them",
        ),
        "message_s": Assumption(
            "a message from or to a worker, at the controller",
            1 / 8038,
            "s",
            "Ray, release/perf_metrics/microbenchmark.json: 1_n_actor_calls_async",
        ),
        "copy_s": Assumption(
            "to copy the state to a joiner",
            STATE_BYTES / copied,
            "s",
            "benchmarks/join.py, rate with 100 MB",
        ),
        "restore_s": Assumption(
            "to read a checkpoint",
            STATE_BYTES / (save["far"]["ours MB/s"]["median"] * 1e6),
            "s",
            "benchmarks/checkpoint.py, store with 20 ms",
        ),
        "process_s": Assumption(
            "to start a process on a free node",
            arrival["arrivals_s"]["process"],
            "s",
            "benchmarks/results/planned.json",
        ),
        "warm_up_s": Assumption(
            "its warm-up", arrival["arrivals_s"]["warm-up"], "s", "benchmarks/results/planned.json"
        ),
        "our_stall_s": Assumption(
            "a checkpoint keeps the loop, ours",
            STATE_BYTES * stall["ours"] / 1e3,
            "s",
            "benchmarks/checkpoint.py, 500 MB",
        ),
        "stall_s": Assumption(
            "a checkpoint keeps the loop, torch's async_save",
            STATE_BYTES * stall[ASYNC] / 1e3,
            "s",
            "benchmarks/checkpoint.py, 500 MB",
        ),
        "silence_s": Assumption(
            "until a silent node is found (ours by the coordinator)",
            recorded("silence")["silent"]["median_s"],
            "s",
            "benchmarks/results/silence.json; the same for all",
        ),
        "restart_s": Assumption(
            "to restart all where somebody looks for the cause",
            600.0,
            "s",
            "MegaScale (NSDI '24), 6.3: detection and diagnosis < 10 min on average",
        ),
        "quorum_s": Assumption(
            "torchft: pause for a lost replica beyond its step",
            torchft["torchft 0.2, tuned"]["pause"]["median_ms"] / 1e3,
            "s",
            "benchmarks/recovery_gpt.py",
        ),
        "rejoin_s": Assumption(
            "torchft: until a replica is back, but for the state",
            torchft["torchft 0.2, tuned"]["full_size_again"]["median_ms"] / 1e3,
            "s",
            "benchmarks/recovery_gpt.py",
        ),
    }


ASYNC = "dcp.async_save"


class Price(NamedTuple):
    """Seconds that one failure of each kind costs, and the share of the time that checkpoints
    take."""

    of_kind: dict[str, float]
    checkpoints: float

    def goodput(self, size: int) -> float:
        mean = sum(self.of_kind[kind] * count for kind, count in KINDS.items()) / FAILURES
        return (1 - mean / (GPU_S / size)) * (1 - self.checkpoints)


def young_daly(stall_s: float, between_s: float) -> float:
    """The interval of checkpoints that costs least."""
    return math.sqrt(2 * stall_s * between_s)


def share_that_ends_all(size: int) -> float:
    """Return the share of the failures after which nobody has the state that counts."""
    kinds = ["a bit flips"] + ["a node ends", "a node falls silent"] * (size <= PER_NODE)
    return sum(KINDS[kind] for kind in kinds) / FAILURES


def costs(a: dict[str, Assumption], all_lost_each_s: float) -> Costs:
    v = {name: one.value for name, one in a.items()}
    return Costs(
        micro_batch_s=v["step_s"] / v["per_worker"],
        per_worker=int(v["per_worker"]),
        **{name: v[name] for name in ("message_s", "notice_s", "claim_s", "connect_s", "copy_s")},
        **{name: v[name] for name in ("heartbeat_s", "restore_s", "process_s", "warm_up_s")},
        checkpoint_every_s=young_daly(v["our_stall_s"], all_lost_each_s),
        checkpoint_stall_s=v["our_stall_s"],
    )


# -------------------------------------------------------------------------------------- failures


def simulated(a: dict[str, Assumption], size: int, standby: int, rounds: int) -> dict[str, Any]:
    cost = costs(a, GPU_S / size / share_that_ends_all(size))
    cluster = SimulatedCluster(size, cost, standby=standby, seed=size)
    full_step_s = cost.per_worker * cost.micro_batch_s * cost.stretch
    strike: dict[str, Callable[[], None]] = {
        "a worker ends": cluster.kill_worker,
        "a node ends": cluster.kill_node,
        "a node falls silent": cluster.lose_node,
        "a bit flips": cluster.flip,
    }
    rng = random.Random(size)
    kinds = [kind for kind in KINDS for _ in range(rounds)]
    rng.shuffle(kinds)
    instants, at, seen = [], 0.0, []
    for _ in [*kinds, ""]:
        instants.append(at)
        at += AFTER_S * (1 + rng.random()) + cost.connect_s * 4 * size
        at += 2 * cost.checkpoint_every_s  # until it is further than before

    def fault(kind: str) -> Callable[[], None]:
        def happens() -> None:
            seen.append(cluster.progress)
            if kind:
                strike[kind]()

        return happens

    cluster.run([(t, fault(kind)) for t, kind in zip(instants, [*kinds, ""], strict=True)], at)
    lost: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for number, kind in enumerate(kinds):
        made = seen[number + 1] - seen[number]
        lost[kind].append(instants[number + 1] - instants[number] - made * full_step_s)
    price = Price(
        {kind: statistics.mean(values) for kind, values in lost.items()},
        1 - 1 / cost.stretch,
    )
    return {
        "goodput": price.goodput(size),
        "price_s": {kind: round(s, 2) for kind, s in price.of_kind.items()},
        "price_s_of_each": {kind: [round(s, 1) for s in all_] for kind, all_ in lost.items()},
        "checkpoint_every_s": round(cost.checkpoint_every_s),
        "failures_simulated": len(kinds),
        "generations": cluster.generations,
        "messages": cluster.messages,
        "longest_event_s": round(cluster.longest_event_s, 3),
    }


def died(kind: str, size: int) -> int:
    return 1 if kind in ("a worker ends", "a bit flips") else min(PER_NODE, size)


def best(a: dict[str, Assumption], size: int) -> Price:
    """What died is done again by the others, and its place is empty until a process is there."""
    empty = a["process_s"].value + a["warm_up_s"].value
    return Price({k: (a["step_s"].value / 2 + empty) * died(k, size) / size for k in KINDS}, 0.0)


def restarted(
    a: dict[str, Assumption], size: int, look_s: float = 0.0, between_s: float | None = None
) -> Price:
    """All processes end at each failure and start again from the newest checkpoint.

    `look_s`: until the cause is found. `between_s`: two such failures; None: two failures.
    """
    every_s = young_daly(a["stall_s"].value, between_s or GPU_S / size)
    again_s = a["process_s"].value + a["warm_up_s"].value + a["restore_s"].value
    again_s += a["connect_s"].value * size + look_s + every_s / 2
    price = {kind: again_s for kind in KINDS}
    price["a node falls silent"] += a["silence_s"].value
    return Price(price, a["stall_s"].value / every_s)


def dropped(a: dict[str, Assumption], size: int) -> Price:
    """All throw the step in flight away and go on without the lost replicas, whose part of each
    batch is missing until they are back, as torchft does. Both changes connect all anew; that the
    others wait for the copy of the state is left out. After a bit that flips all go back to a
    checkpoint, as in the others, though torchft does not look for it.
    """
    whole = restarted(a, size, between_s=GPU_S / size / share_that_ends_all(size))
    change_s = a["connect_s"].value * size
    away_s = a["rejoin_s"].value + a["copy_s"].value + change_s
    price = {}
    for kind in KINDS:
        if kind == "a bit flips" or died(kind, size) == size:
            price[kind] = whole.of_kind[kind]
            continue
        price[kind] = a["step_s"].value + a["quorum_s"].value + 2 * change_s
        price[kind] += away_s * died(kind, size) / size
    if size > PER_NODE:
        price["a node falls silent"] += a["silence_s"].value
    return Price(price, whole.checkpoints)


def of_size(a: dict[str, Assumption], size: int, rounds: int) -> dict[str, Any]:
    found: dict[str, Any] = {
        "workers": size,
        "hours_between_failures": round(GPU_S / size / 3600, 2),
        "elastic_dp": simulated(a, size, 0, rounds),
        f"elastic_dp, {STANDBY} standbys": simulated(a, size, STANDBY, rounds),
    }
    peers = {
        "best possible": best(a, size),
        "dropped batch": dropped(a, size),
        "restart, as fast as measured": restarted(a, size),
        "restart, 10 minutes": restarted(a, size, a["restart_s"].value),
    }
    for name, price in peers.items():
        shown = {kind: round(s, 3) for kind, s in price.of_kind.items()}
        found[name] = {"goodput": price.goodput(size), "price_s": shown}
    found["form_generation_bytes"] = form_generation_bytes(size)
    return found


def form_generation_bytes(size: int) -> int:
    """One message that each member gets, which is serialized once."""
    position = m.TrainingPosition(1)
    members = tuple(m.Member(f"w{i}", ((8 * i, 8 * i + 8),), position, True) for i in range(size))
    return len(pickle.dumps(m.FormGeneration(m.Membership(2, members, "w0", 5.0))))


# ------------------------------------------------------------------------------------------ spot


def spot(a: dict[str, Assumption], size: int) -> dict[str, Any]:
    """The share of the steps that the capacity of each instant could make. Without peers that
    have no free node: a place that is back has its process after `process_s`."""
    trace = published(SPOT_S, size)
    changes = trace.changes[1:]
    cost = costs(a, SPOT_S)
    cluster = SimulatedCluster(size, cost, seed=size)

    def change(places: int) -> Callable[[], None]:
        return lambda: cluster.allow(places)

    cluster.run([(at, change(places)) for at, places in changes], SPOT_S)
    step_s = cost.per_worker * cost.micro_batch_s
    capacity_s = trace.place_seconds / size
    each_s = SPOT_S / len(changes)
    every_s = young_daly(a["stall_s"].value, each_s)
    again_s = restarted(a, size).of_kind["a worker ends"]
    again_s += every_s / 2 - young_daly(a["stall_s"].value, GPU_S / size) / 2
    change_s = a["connect_s"].value * size + a["quorum_s"].value + a["step_s"].value
    spans = [*trace.spans]
    part = [n / size for _, _, n in spans[1:]]  # of the capacity, after each change
    restart = sum(p * again_s for p in part) + capacity_s * a["stall_s"].value / every_s
    drop = sum(p * change_s for p in part)
    return {
        "workers": size,
        "changes": len(changes),
        "best possible": 1.0,
        "elastic_dp": (cluster.progress - cluster.first) * step_s / capacity_s,
        "dropped batch": 1 - drop / capacity_s,
        "restart, as fast as measured": 1 - restart / capacity_s,
        "generations": cluster.generations,
        "longest_event_s": round(cluster.longest_event_s, 3),
    }


# ------------------------------------------------------------------------------------------ plot

LINES = {
    "best possible": ("#202124", ":"),
    f"elastic_dp, {STANDBY} standbys": ("#1a73e8", "-"),
    "elastic_dp": ("#1a73e8", "--"),
    "dropped batch": ("#f29900", "-"),
    "restart, as fast as measured": ("#d93025", "--"),
    "restart, 10 minutes": ("#d93025", "-"),
}


def draw(results: dict[str, Any], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    matplotlib.rcParams |= {"svg.hashsalt": "elastic_dp", "svg.fonttype": "none", "font.size": 9.5}
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4.8))
    rows = results["failures"]
    sizes = [row["workers"] for row in rows]
    for name, (color, style) in LINES.items():
        price = [1 - row[name]["goodput"] for row in rows]
        left.plot(sizes, price, style, color=color, marker="o", ms=3, label=name)
        if name in results["spot"][0]:
            share = [row[name] for row in results["spot"]]
            right.plot(
                [row["workers"] for row in results["spot"]], share, style, color=color, marker="o",
                ms=3,
            )  # fmt: skip
    left.set(xscale="log", yscale="log", ylabel="share of the time that is lost")
    left.set_title("failures as in Llama 3 (419 in 54 days on 16,384 GPUs)", fontsize=9.5)
    right.set(xscale="log", ylabel="goodput, of the capacity that is there", ylim=(0.9, 1.004))
    right.set_title("17 hours of AWS spot capacity", fontsize=9.5)
    for axis in (left, right):
        axis.set_xticks(sizes, [f"{size:,}" for size in sizes])
        axis.minorticks_off()
        axis.set(xlabel="workers")
        axis.spines[["top", "right"]].set_visible(False)
    figure.legend(frameon=False, fontsize=8.5, ncols=3, loc="lower center")
    figure.tight_layout(rect=(0, 0.1, 1, 1))
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


def pieces(a: dict[str, Assumption], sizes: list[int], quick: bool) -> Iterator[tuple[str, Any]]:
    yield "assumptions", {name: one._asdict() for name, one in a.items()}
    failures, markets = [], []
    for size in sizes:
        failures.append(of_size(a, size, 1 if quick else ROUNDS[size]))
        shares = {k: round(v["goodput"], 6) for k, v in failures[-1].items() if k in LINES}
        print(f"{size:6d} workers, failures: {shares}", flush=True)
    yield "failures", failures
    for size in sizes:
        markets.append(spot(a, size))
        print(f"{size:6d} workers, spot: {markets[-1]}", flush=True)
    yield "spot", markets


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--sizes", type=int, nargs="+", default=[*ROUNDS], choices=[*ROUNDS])
    parser.add_argument("--draw", action="store_true", help="only draw what was simulated before")
    add_quick(parser)
    options = parser.parse_args()
    if not options.draw:
        a = assumptions()
        for one in a.values():
            print(f"{one.what}: {one.value:.6g} {one.unit} ({one.source})", flush=True)
        results = dict(pieces(a, [8, 64] if options.quick else options.sizes, options.quick))
        if options.quick:
            return 0
        print(write(NAME, results))
    draw(recorded(NAME), SVG)
    return 0


if __name__ == "__main__":
    sys.exit(main())

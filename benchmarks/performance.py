"""Write docs/performance.md from benchmarks/results/: every measurement with its command, date,
hardware and target.

    python -m benchmarks.performance

It also writes the measured lines of README.md. `tests/test_docs.py` fails where either is not what
the results say.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.models import SMALL
from benchmarks.recovery_gpt import COLD, OURS, PEER
from benchmarks.report import RESULTS

README = Path(__file__).parent.parent / "README.md"
HEAD = "| what | measured | command |\n|---|---|---|\n"  # of the table in README.md
PAGE = Path(__file__).parent.parent / "docs" / "performance.md"

INTRODUCTION = """# Performance

All measurements of this project. This page is written by `python -m benchmarks.performance` from
`benchmarks/results/`; do not edit it.

Everything here was measured on CPUs, with Gloo, on one machine of two cores. Workers share
these cores, so five workers are slower than three. **Nothing was measured on a GPU.**
`benchmarks.picture`, `recovery`, `recovery_gpt`, `kill_in_step`, `work_lost`, `device_pause`,
`join`, `planned`, `data_cache`, `step_overhead`, `telemetry_overhead`, `first_five_minutes`,
`against_commit`, `compression`, `compression_loss`, `diloco_kills`, `sharding`, `sharding_memory`,
`sharding_changes`, `coordinator_scale` and `command_line` end with exit code 1 where a target is
missed, and name it. V is the number of virtual workers and W the number of workers. Square brackets
are 95 % intervals.
"""


class Row(NamedTuple):
    what: str
    measured: str
    target: str = ""
    met: bool | None = None  # None: there is no target


def recovery(r: dict[str, Any]) -> Iterator[Row]:
    theirs = r["torchft 0.2, tuned, 3 workers"]["pause"]
    for size in (3, 5):
        one = r[f"{size} workers"]
        pause, forming = one["pause"], one["hit_while_forming"]
        target = theirs["median_ms"] / 2
        yield Row(
            f"Pause after SIGKILL of a random worker, {size} workers, {pause['count']} "
            f"kills, step of {one['step_ms']:.1f} ms",
            f"median {pause['median_ms']:.0f} ms, p90 {pause['p90_ms']:.0f}, max "
            f"{pause['max_ms']:.0f}",
            f"half of tuned torchft's: {target:.0f} ms",
            pause["median_ms"] <= target,
        )
        yield Row(
            f"The same where the kill hits a group while it forms, {forming['count']} kills",
            f"median {forming['median_ms']:.0f} ms, max {forming['max_ms']:.0f}",
            f"{forming['forming_deadline_ms']} ms",
            forming["max_ms"] <= forming["forming_deadline_ms"],
        )
        yield Row(
            f"Weights after these {one['generations']} generations beside an undisturbed run",
            "equal" if one["exact"] else "different",
            "equal",
            one["exact"],
        )
    for name in ("tuned", "default"):
        pause = r[f"torchft 0.2, {name}, 3 workers"]["pause"]
        yield Row(
            f"torchft 0.2 beside it, {name}, 3 replicas, {pause['count']} kills",
            f"median {pause['median_ms']:.0f} ms, max {pause['max_ms']:.0f}",
        )
    kills = r["Ray Train, checkpoint each 20 steps, 3 workers"]["kills"]
    yield Row(
        f"Ray Train 2.60 beside it, checkpoint each 20 steps, {len(kills)} kills, to the "
        "first new step",
        ", ".join(f"{kill['to_new_step_s']:.1f}" for kill in kills)
        + f" s; {min(k['steps_redone'] for k in kills)} to "
        f"{max(k['steps_redone'] for k in kills)} steps redone",
    )


def device_pause(r: dict[str, Any]) -> Iterator[Row]:
    from benchmarks.device_pause import SLOW_S, TARGET_MS

    fast, slow = (r[f"connecting takes {s:g} s"] for s in (0.0, SLOW_S))
    for kind, what in (("kills", "Pause after SIGKILL of a worker"), ("joins", "Pause of a join")):
        more = slow[kind]["median_ms"] - fast[kind]["median_ms"]
        yield Row(
            f"{what}, 3 workers, communicators that take {SLOW_S:g} s to connect, and that stand "
            f"at once; {slow[kind]['count']} and {fast[kind]['count']}",
            f"medians {slow[kind]['median_ms']:.0f} and {fast[kind]['median_ms']:.0f} ms",
            f"at most {TARGET_MS:.0f} ms more",
            more <= TARGET_MS,
        )
    same = fast["same_weights"] and slow["same_weights"]
    yield Row(
        "Weights of these runs, before and after gradients change to the communicator, beside an "
        "undisturbed run",
        "equal" if same else "different",
        "equal",
        same,
    )


def join(r: dict[str, Any]) -> Iterator[Row]:
    one = r["with a standby"]
    full = one["kill_to_full_size"]
    yield Row(
        f"From a kill to full size with a standby, {full['count']} kills",
        f"median {full['median_ms']:.0f} ms, max {full['max_ms']:.0f}",
        f"{one['target_ms']:.0f} ms",
        full["median_ms"] <= one["target_ms"],
    )
    for size in ("4 MB", "100 MB"):
        one = r[f"2 to 3 workers, state of {size}"]
        pause, target = one["pause_beyond_copy"], one["target_pause_beyond_copy_ms"]
        yield Row(
            f"Pause for a joiner beyond the copy of the state, {size}, {pause['count']} joins",
            f"median {max(0, pause['median_ms']):.0f} ms, max {pause['max_ms']:.0f}",
            f"{target:.0f} ms",
            pause["median_ms"] <= target,
        )
        rate, target = one["copy_rate_to_bare_broadcast"], one["target_copy_rate"]
        rates = one["copy_rates_to_bare_broadcast"]
        yield Row(
            f"Rate of that copy beside a bare broadcast, {size}",
            f"{rate:.2f} ({min(rates):.2f} to {max(rates):.2f})",
            f"{target}",
            rate >= target,
        )
        before, meanwhile = one["steps_before"], one["steps_while_it_starts"]
        yield Row(
            f"Step time while the joiner starts, two full cores, {size}: before, meanwhile",
            f"{before['median_ms']:.0f}, {meanwhile['median_ms']:.0f} ms",
        )


def planned(r: dict[str, Any]) -> Iterator[Row]:
    for name, what in (
        ("changes", "Planned changes on Ray: the longest pause"),
        ("with a standby", "The same where a standby replaces a worker that leaves"),
    ):
        one = r[name]
        count = sum(kind["count"] for kind in one["pauses"].values())
        yield Row(
            f"{what}, {count} changes",
            f"{one['longest_ms']:.0f} ms",
            f"{one['target_ms']:.0f} ms",
            one["longest_ms"] <= one["target_ms"],
        )
    arrival = r["changes"]["arrivals_s"]
    yield Row(
        "From a place on a node to the first step there: process, warm-up, join",
        f"{arrival['process']:.1f}, {arrival['warm-up']:.1f}, {arrival['join']:.1f} s",
    )
    nodes = [one["node"] for one in r["from a new node to its first step"]["of_each_s"].values()]
    yield Row(
        "Before that, for an autoscaled local node", f"{min(nodes):.0f} to {max(nodes):.0f} s"
    )


def notice(r: dict[str, Any]) -> Iterator[Row]:
    yield Row(
        "Pause of a notice of 30 s with a replacement, of a planned leave, of a join, "
        f"{r['notice']['count']} each",
        f"medians {r['notice']['median_ms']:.0f}, {r['leave']['median_ms']:.0f}, "
        f"{r['join']['median_ms']:.0f} ms",
    )
    yield Row("Steps done again", f"{r['steps_redone']}", "0", r["steps_redone"] == 0)
    asked = r["asked_after_s"]
    yield Row(
        "The replacement is asked for after",
        f"at most {asked['most']:.2f} s",
        f"{asked['target']:.0f} s",
        asked["most"] <= asked["target"],
    )


def silence(r: dict[str, Any]) -> Iterator[Row]:
    loaded, silent = r["loaded"], r["silent"]
    yield Row(
        f"Longest time without a heartbeat, {loaded['seconds'] / 60:.0f} minutes, "
        f"{loaded['processes_beside']} busy "
        f"processes on two cores; workers evicted",
        f"{loaded['longest_silence_s']:.2f} s; {loaded['evicted']}",
        f"{loaded['timeout_s']:.0f} s; 0",
        not loaded["missed"],
    )
    found = silent["found_after_s"]
    yield Row(
        f"A node that falls silent is found after, {len(found)} times",
        f"median {silent['median_s']:.1f} s, max {max(found):.2f}",
        f"{silent['limit_s']:.0f} s",
        not silent["missed"],
    )


def spot(r: Sequence[dict[str, Any]]) -> Iterator[Row]:
    for one in r:
        yield Row(
            f"Goodput, {one['trace']}, {one['changes']} changes in {one['seconds']:.0f} s",
            f"{one['goodput']:.3f}; {one['goodput_all_restarted']:.2f} where all workers are "
            "restarted at each change",
            f"{one['target']}",
            one["goodput"] >= one["target"],
        )
        yield Row(
            "Weights beside an undisturbed run",
            "equal" if one["same_weights_as_undisturbed"] else "different",
            "equal",
            one["same_weights_as_undisturbed"],
        )


def step_overhead(r: Sequence[dict[str, Any]]) -> Iterator[Row]:
    from benchmarks.step_overhead import targets

    for one, (target, met) in zip(r, targets(r).items(), strict=True):
        per_worker = one["virtual_workers_per_worker"]
        beside = "V = W" if per_worker == 1 else "V = 4W, beside DDP with gradient accumulation"
        low, high = one["interval"]
        yield Row(
            f"Step time beside DDP, {one['parameters']} parameters, "
            f"`exact={one['mode'] == 'exact'}`, {beside}, {one['pairs']} pairs",
            f"{one['ratio']:.3f} [{low:.2f}, {high:.2f}]",
            target.rpartition(": ")[2].partition(" ")[0],
            met,
        )


def compression(r: dict[str, Any]) -> Iterator[Row]:
    from benchmarks.compression import MOST_BYTES, argument, measured, targets

    hooks = {"bf16": " and its `fp16_compress_hook`", "int8": " and its `powerSGD_hook`"}
    met = iter(targets(r).values())
    for name, one in r.items():
        if "link_gbit_s" in one["None"]:
            carried = [found["link_gbit_s"] for found in one.values()]
            yield Row(
                f"What one connection carries without a run, {name}",
                f"{min(carried):.2f} to {max(carried):.2f} Gb/s",
            )
        for setting in measured(one):
            without, changed = one["None"], one[setting]
            what = f"`{argument(setting)}`, {name}"
            compresses = changed["ddp_mb"] < 0.9 * without["ddp_mb"]
            hook = hooks.get(setting, "") if compresses else ""
            inner = setting == "inner"
            step, step_time = ("an inner step", "Its time") if inner else ("a step", "Step time")
            yield Row(
                f"Bytes of {step} with {what}",
                f"{changed['ours_mb'] / without['ours_mb']:.3f} of {without['ours_mb']:.1f} MB",
                f"{MOST_BYTES[setting]}",
                next(met),
            )
            yield Row(
                f"{step_time} without and with {what}",
                f"{without['ours_ms']:.0f} and {changed['ours_ms']:.0f} ms",
            )
            yield Row(
                f"The same of DDP{hook}, {name}",
                f"{without['ddp_ms']:.0f} and {changed['ddp_ms']:.0f} ms",
            )
            (low, high), (low_with, high_with) = without["interval"], changed["interval"]
            yield Row(
                f"Ours beside DDP without and with {what}, {changed['pairs']} pairs",
                f"{without['ratio']:.3f} [{low:.2f}, {high:.2f}] and "
                f"{changed['ratio']:.3f} [{low_with:.2f}, {high_with:.2f}]",
            )


def compression_loss(r: dict[str, Any]) -> Iterator[Row]:
    from benchmarks.compression_loss import compared, deviation, differences, ends, label, targets

    without, met = [*ends(r, "None").values()], iter(targets(r).values())
    yield Row(
        f"Loss after {r['steps']} steps without any setting, mean of {len(without)} seeds",
        f"{statistics.fmean(without):.4f}, standard deviation {deviation(r):.4f}",
    )
    for setting in compared(r):
        more, what = differences(r, setting), f"`{label(setting, r['steps'])}`"
        each = ", ".join(f"{x:+.5f}" for x in more)
        yield Row(
            f"How much more it is with {what}, mean of {len(more)} seeds",
            f"{statistics.fmean(more):+.5f} ({each})",
            f"the standard deviation of the seeds, {deviation(r):.4f}",
            next(met),
        )


def diloco_kills(r: dict[str, Any]) -> Iterator[Row]:
    from benchmarks.diloco_kills import INNER_STEPS, WORKERS, targets

    (met,) = targets(r).values()
    for name, one in r.items():
        if isinstance(one, str):
            yield Row(name, one)
            continue
        who, is_ours = f"{name}, {one['kills']} kills", name == "elastic_dp"
        yield Row(
            f"Inner steps in a second without a kill, each island, {name}",
            f"{one['inner_steps_per_s']}",
        )
        yield Row(
            f"Inner steps lost by a kill, {who}",
            f"mean {statistics.fmean(one['lost']):.1f}, max {max(one['lost'])}",
            f"fewer than {WORKERS * INNER_STEPS}, a whole step" if is_ours else "",
            met if is_ours else None,
        )
        still, whole, cost = one["still_ms"], one["whole_s"], one["cost_s"]
        yield Row(
            f"Longest time in which the survivor began no inner step, {who}",
            f"median {statistics.median(still):.0f} ms, max {max(still)}; "
            f"without a kill {one['still_calm_ms']}",
        )
        yield Row(
            f"From the kill until both have committed together again, {who}",
            f"median {statistics.median(whole):.1f} s, max {max(whole)}",
        )
        yield Row(
            f"Seconds of training of both that a kill costs, {who}",
            f"median {statistics.median(cost):.1f}, max {max(cost)}",
        )


def sharding(r: Sequence[dict[str, Any]]) -> Iterator[Row]:
    from benchmarks.sharding import TARGET, targets

    met = targets(list(r))
    for one in r:
        where = f"{one['parameters']}, {one['workers']} workers"
        what = f"{one['parameters']} parameters, {one['workers']} workers"
        for name, (middle, low, high) in one["beside"].items():
            judged: tuple[Any, ...] = ()
            if name == "not sharded":
                judged = (
                    f"{TARGET}",
                    met[f"{where}: {TARGET} of the time of a step that is not sharded"],
                )
            peer = "a step that is not sharded" if name == "not sharded" else name
            yield Row(
                f"Step time, beside {peer}, {what}, {one['rounds']} rounds",
                f"{middle:.3f} [{low:.2f}, {high:.2f}]",
                *judged,
            )
        yield Row(
            f"Bytes that a worker sends in a step, beside the parameters, {what}",
            f"{one['sent_by_parameters']:.2f}",
            f"{2 + 1 / one['workers']:.2f}",
            met[f"{where}: 2 + 1/W times the parameters are sent"],
        )


def sharding_memory(r: Sequence[dict[str, Any]]) -> Iterator[Row]:
    from benchmarks.sharding_memory import BEYOND, targets

    met = targets(list(r))
    for one in r:
        where = f"{one['parameters']}, {one['workers']} workers, {one['system']}"
        if "dtype" in one:
            yield Row(f"{where}, {one['dtype']}", f"{one['gigabytes_without_activations']:.0f} GB")
            continue
        target = f"{one['by_formula']:.1f} + {BEYOND:g}" if "by_formula" in one else ""
        yield Row(
            f"Bytes of memory for each parameter, {where}",
            f"{one['bytes_by_parameter']:.1f}",
            target,
            met.get(f"{where}: the formula"),
        )


def sharding_changes(r: Sequence[dict[str, Any]]) -> Iterator[Row]:
    from benchmarks.sharding_changes import MORE_MS, MOST_MOVED, targets

    sharded, replicated = r
    same, pause, moved = targets(list(r)).values()
    more, low, high = sharded["more_ms"]
    where = f"{sharded['parameters']} parameters, {sharded['workers']} workers"
    yield Row(
        f"Pause after SIGKILL with and without it, {where}, {len(sharded['pauses_ms'])} kills each",
        f"{sharded['median_pause_ms']:.0f} and {replicated['median_pause_ms']:.0f} ms; "
        f"at the same point of a step {more:.0f} [{low:.0f}, {high:.0f}] more",
        f"{MORE_MS:.0f} ms more",
        pause,
    )
    yield Row(
        f"Bytes moved after a kill, beside the least possible, {where}",
        f"at most {max(sharded['moved_by_least']):.3f}",
        f"{MOST_MOVED:g}",
        moved,
    )
    yield Row("Weights after these kills", "equal" if same else "different", "equal", same)


def telemetry_overhead(r: Sequence[dict[str, Any]]) -> Iterator[Row]:
    from benchmarks.telemetry_overhead import TARGET, targets

    for one, met in zip(r, targets(r).values(), strict=True):
        low, high = one["interval"]
        yield Row(
            f"Step time with all telemetry beside none, {one['parameters']} parameters, "
            f"{one['workers']} workers, {one['pairs']} pairs of {one['steps_a_block']} steps, "
            f"step of {one['without_ms']:.0f} ms; all of it {one['times']} times as often",
            f"{one['ratio']:.4f} [{low:.4f}, {high:.4f}]",
            f"{TARGET}",
            met,
        )
        if added := one.get("added_cpu_us"):
            us, low, high = added["all"]
            yield Row(
                f"Processor time that {one['times']} times telemetry adds to such a step, in the "
                "workers and the controller",
                f"{us / 1e3:.2f} ms [{low / 1e3:.2f}, {high / 1e3:.2f}]",
            )


def first_five_minutes(r: dict[str, Any]) -> Iterator[Row]:
    from benchmarks.first_five_minutes import TARGET_S, targets

    in_time, shown = targets(r).values()
    installs = sum(s for what, s in r["seconds"].items() if "pip" in what or "venv" in what)
    yield Row(
        "From an empty environment to the report of a run with a worker killed",
        f"{r['total_s']:.0f} s, of which {installs:.0f} s to install",
        f"{TARGET_S:.0f} s",
        in_time,
    )
    yield Row(
        "The report shows the kill, and that the run finished",
        "yes" if shown else "no",
        "yes",
        shown,
    )


def soak(r: dict[str, Any]) -> Iterator[Row]:
    yield Row(
        f"{r['minutes']} minutes on five emulated hosts, {sum(r['faults'].values())} faults "
        f"of {len(r['faults'])} kinds: goodput",
        f"{r['goodput']:.2f}; {r['generations']} generations, {r['workers_lost']} workers lost",
    )
    yield Row(
        "Rows lost or repeated, processes or files left over",
        f"{len(r['problems'])}",
        "0",
        not r["problems"],
    )
    yield Row(
        "Weights beside an undisturbed run",
        "equal" if r["same_weights"] else "different",
        "equal",
        r["same_weights"],
    )


def picture(r: dict[str, Any]) -> Iterator[Row]:
    calm, killed = r["undisturbed"], r["with kills"]
    same = calm["weights_sha256"] == killed["weights_sha256"]
    yield Row(
        f"The picture of the first page: {killed['workers_lost']} workers killed in "
        f"{killed['steps']} steps, weights beside an undisturbed run",
        "equal" if same else "different",
        "equal",
        same,
    )
    yield Row(
        "Time undisturbed, and with kills (replacements start on the same two cores)",
        f"{calm['seconds']:.0f} s, {killed['seconds']:.0f} s",
    )


def coordinator_scale(r: Sequence[dict[str, Any]]) -> Iterator[Row]:
    from benchmarks.coordinator_scale import TARGET_MS

    for one in r:
        changes = one["changes"].values()
        longest = max(change["max_ms"] for change in changes)
        yield Row(
            f"{one['workers']:,} workers: p99 of an event (largest of {len(changes)} kinds "
            "of change), longest event, longest garbage collection between events; memory",
            f"{max(change['p99_ms'] for change in changes):.2f}, {longest:.1f}, "
            f"{one['longest_collection_ms']:.1f} ms; "
            f"{one['bytes_per_worker']:,} bytes a worker",
            f"{TARGET_MS:g} ms",
            longest <= TARGET_MS,
        )


def checkpoint(r: dict[str, Any]) -> Iterator[Row]:
    save = r["save"]
    names = {
        "stall / bare copy": "Time taken from the loop, beside a bare copy of the state",
        "stall / dcp.async_save": "Time taken from the loop, beside "
        "`torch.distributed.checkpoint.async_save`",
        "cpu / torch.save": "Processor time, beside `torch.save`",
        "cpu / dcp.save": "Processor time, beside `torch.distributed.checkpoint.save`",
        "cpu / dcp.async_save": "Processor time, beside `async_save`",
    }
    for key, what in names.items():
        yield ratio_row(f"{what}, {save['megabytes']} MB", save["ratios"][key], most=True)
    steps = [
        f"{save[name]['step_ms meanwhile']['median']:.1f}"
        for name in ("ours", "dcp.async_save", "dcp.save", "torch.save")
    ]
    yield Row(
        f"A step of {save['step_ms in peace']:.1f} ms while a checkpoint is written: ours, "
        "`async_save`, `save`, `torch.save`",
        f"{', '.join(steps)} ms",
    )
    yield ratio_row("Host memory, beside the state", r["memory"]["host memory / state"], most=True)
    yield ratio_row(
        "Reading it back, beside bare reads from the page cache", r["restore"]["ours / bare"]
    )
    yield ratio_row(
        "The same from a store with 20 ms and 90 MB/s a connection", r["far"]["ours / bare"]
    )


def ratio_row(what: str, found: dict[str, Any], *, most: bool = False) -> Row:
    low, high = found["interval"]
    met = found["median"] <= found["target"] if most else found["median"] >= found["target"]
    words = f"{'at most' if most else 'at least'} {found['target']}"
    return Row(what, f"{found['median']:.2f} [{low:.2f}, {high:.2f}]", words, met)


PEERS = {
    "hugging_face": "Hugging Face datasets",
    "litdata": "litdata",
    "mosaicml": "mosaicml streaming",
    "ray_data": "Ray Data",
    "trl": "trl",
    "webdataset": "WebDataset",
}


def data(r: dict[str, Any]) -> Iterator[Row]:
    for key, found in r["local"]["ratios"].items():
        ours, _, bare = key.partition(" / ")
        yield ratio_row(
            f"Rows per second, {ours}, beside a loop that only reads and decodes ({bare})", found
        )
    rows = {name: found["median"] for name, found in r["local"]["rows_per_s"].items()}
    for order in ("in order", "shuffled"):
        others = peers_of(r["local"]["peers_rows_per_s"], order)
        ours = rows[f"parquet {order}"]
        name, shown = f"Thousand rows of 4 KiB a second, {order}", f"{ours / 1000:.0f} (Parquet)"
        yield ahead(name, shown, ours, others, digits=0)
    yield from packing(r.get("packing", {}))
    for name, sizes in r["memory"].items():
        if name.startswith("row groups"):
            target = r["memory"]["target_growth_to_budget"]
            yield Row(
                f"Growth of a worker's memory beside `memory_bytes`, {name}, "
                f'`shuffle="{sizes["shuffle"]}"`',
                f"{sizes['growth_to_budget']:.2f}",
                f"at most {target}",
                sizes["growth_to_budget"] <= target,
            )
    for name in ("20 ms", "20 ms, 90 MB/s per connection"):
        store = r["store"][name]
        for order in ("in order", "shuffled"):
            found = store[order]
            low, high = found["interval"]
            yield Row(
                f"Parquet from a store with {name}, {order}, beside the best hand-written "
                "loop with as many requests in flight",
                f"{found['ratio']:.2f} [{low:.2f}, {high:.2f}]",
                f"at least {found['target']}",
                found["ratio"] >= found["target"],
            )
    waiting = r["waiting"]
    for kind in ("sleep", "compute"):
        one = waiting[kind]
        changes = one["waited_share_in_2_s_after_changes"]
        yield Row(
            f"Share of {one['seconds']:.0f} s that a loop of {waiting['step_ms']:.0f} ms "
            f"({kind}) waits for its data",
            f"{one['waited_share']:.2%} ({one['waited_share_in_first_2_s']:.1%} of its first 2 s)",
            f"at most {waiting['target_share']:.0%}",
            one["waited_share"] <= waiting["target_share"],
        )
        yield Row(
            f"The same in the 2 s after a change of the generation, {len(changes)} changes",
            f"{min(changes):.2%} to {max(changes):.2%}",
            f"at most {waiting['target_share']:.0%}",
            max(changes) <= waiting["target_share"],
        )


def peers_of(found: dict[str, Any], order: str) -> dict[str, float]:
    """Those that were measured in this order, by their names."""
    return {
        PEERS[name.removesuffix(f" {order}")]: one["median"]
        for name, one in found.items()
        if isinstance(one, dict) and name.endswith(f" {order}")
    }


def packing(r: dict[str, Any]) -> Iterator[Row]:
    for shuffle, order in (("none", "in order"), ("rows", "shuffled")):
        if not (others := peers_of(r.get("peers_rows_per_s", {}), order)):
            continue
        ours = r[f"shuffle={shuffle}, rows_per_s"]
        alone, both = ours["packed_alone"], ours["packed"]
        name = f"Thousand rows of 1,024 tokens a second, packed from documents, {order}"
        ids = f"and with `position_ids` and `document_ids` {both / 1000:.0f}"
        yield ahead(name, f"{alone / 1000:.0f}, {ids}", alone, others, digits=1)


def ahead(name: str, shown: str, ours: float, others: dict[str, float], *, digits: int) -> Row:
    """Thousands a second: ours as it is `shown`, and those of the others."""
    of_others = ", ".join(f"{other} {n / 1000:.{digits}f}" for other, n in others.items())
    return Row(name, f"{shown}; {of_others}", "ahead", ours > max(others.values()))


def data_cache(r: dict[str, Any]) -> Iterator[Row]:
    for name, found in r.items():
        if isinstance(found, dict):
            low, high = found["interval"]
            yield Row(
                "The second epoch from a far store, kept in the cache on the disk, beside local "
                f"shards: {name}",
                f"{found['ratio']:.2f} [{low:.2f}, {high:.2f}]",
                f"at least {r['target']}",
                found["ratio"] >= r["target"],
            )


def command_line(r: dict[str, Any]) -> Iterator[Row]:
    from benchmarks.command_line import TARGET_S

    medians = [found["median_s"] for found in r.values()]
    yield Row(
        "A call of `elastic-dp` that needs no Ray, as a whole process, load of 8 on two "
        f"cores: medians of {len(medians)} calls",
        f"{min(medians):.2f} to {max(medians):.2f} s",
        f"{TARGET_S} s",
        max(medians) <= TARGET_S,
    )


def balance(r: dict[str, Any]) -> Iterator[Row]:
    targets = r["targets"]
    yield Row(
        'Step time with `balance="measured"`, one worker half as fast, beside the ideal split',
        f"{r['step_by_ideal']:.2f} (equal split: {r['equal_by_ideal']:.2f})",
        f"{targets['step_by_ideal']}",
        r["step_by_ideal"] <= targets["step_by_ideal"],
    )
    yield Row(
        "Measuring, per step",
        f"{r['measuring_us_per_step']:.1f} µs",
        f"{targets['measuring_us_per_step']:.0f} µs",
        r["measuring_us_per_step"] <= targets["measuring_us_per_step"],
    )


def simulation(r: dict[str, Any]) -> Iterator[Row]:
    first, last = r["seeds"]
    yield Row(
        f"Simulated runs of the coordinator, {last - first:,} seeds, "
        f"{r['seen']['generations']:,} generations: invariants violated",
        f"{len(r['failed'])}",
        "0",
        not r["failed"],
    )


def recovery_gpt(r: dict[str, Any]) -> Iterator[Row]:
    for size in SMALL:
        us, cold, them = r[size][OURS], r[size][COLD], r[size][PEER]
        what = f"GPT of {size}, step of {us['step_ms'][0]:.0f} ms, {us['pause']['count']} kills"
        median, theirs = us["pause"]["median_ms"], them["pause"]["median_ms"]
        yield Row(
            f"Pause after SIGKILL, {what}",
            f"median {median:.0f} ms, max {us['pause']['max_ms']:.0f}",
            f"half of tuned torchft's median of {theirs:.0f} ms",
            median <= theirs / 2,
        )
        again, sooner = us["full_size_again"], them["full_size_again"]
        yield Row(
            "The same kills, until all three workers have committed a step together",
            f"median {again['median_ms'] / 1e3:.1f} s, max {again['max_ms'] / 1e3:.1f}",
            f"torchft's median of {sooner['median_ms'] / 1e3:.1f} s",
            again["median_ms"] <= sooner["median_ms"],
        )
        again = cold["full_size_again"]
        yield Row(
            f"The same with `warm_processes=0`, {again['count']} kills",
            f"median {again['median_ms'] / 1e3:.1f} s, max {again['max_ms'] / 1e3:.1f}",
        )


def kill_in_step(r: dict[str, Any]) -> Iterator[Row]:
    for mode, target in (("exact", "810 ms: three micro-batches of 250 ms, and 60"), ("fast", "")):
        one = r[mode]
        yield Row(
            f"How much later a step of {one['step_s']:.1f} s is committed after a kill within it, "
            f"{mode} mode, {len(one['more_s'])} kills",
            f"median {1e3 * one['more_s_median']:.0f} ms, max {1e3 * one['more_s_worst']:.0f}",
            target,
            one["more_s_median"] <= 0.81 if target else None,
        )
        again = sorted(one["passes_again"])
        yield Row(
            f"Micro-batches of its 32 that ran again, {mode} mode",
            f"median {again[len(again) // 2]}, max {again[-1]}",
            "8: those of the lost worker" if target else "",
            again[-1] <= 8 if target else None,
        )


def work_lost(r: dict[str, Any]) -> Iterator[Row]:
    from benchmarks.work_lost import EVERY, VIRTUAL, targets

    ours, died = r["elastic_dp"], r["what died"]
    met = targets(r)
    yield Row(
        f"Micro-batches lost by a kill of one of 4 workers, {VIRTUAL} in a step, {ours['kills']} "
        "kills",
        _lost(ours),
        f"what died: mean {died['mean']:.1f}",
        met["a kill costs what died"],
    )
    theirs = r["torchft 0.2"]
    if isinstance(theirs, dict):
        yield Row(f"torchft 0.2 beside it, {theirs['kills']} kills", _lost(theirs))
    yield Row(
        f"A restart from a checkpoint each {EVERY} steps, at the kills of the first line",
        _lost(r[f"restart, checkpoint each {EVERY} steps"]),
    )
    same = met["the weights of the undisturbed run"]
    yield Row(
        f"Weights after these {r['steps']} steps beside an undisturbed run",
        "equal" if same else "different",
        "equal",
        same,
    )


def _lost(one: dict[str, Any]) -> str:
    return f"median {one['median']:g}, mean {one['mean']:.1f}, max {one['max']}"


def goodput_at_scale(r: dict[str, Any]) -> Iterator[Row]:
    from benchmarks.goodput_at_scale import STANDBY

    def lost(row: dict[str, Any], name: str) -> str:
        return f"{1 - row[name]['goodput']:.2g}".replace("e-0", "e-")

    for row in r["failures"]:
        yield Row(
            f"Share of the time lost, {row['workers']:,} workers, a failure each "
            f"{row['hours_between_failures']:,.0f} hours",
            f"{lost(row, 'elastic_dp')}; with {STANDBY} standbys "
            f"{lost(row, f'elastic_dp, {STANDBY} standbys')}; dropped batch "
            f"{lost(row, 'dropped batch')}; restart "
            f"{lost(row, 'restart, as fast as measured')}, or "
            f"{lost(row, 'restart, 10 minutes')} with 10 minutes to find the cause; best possible "
            f"{lost(row, 'best possible')}",
        )
    for row in r["spot"]:
        yield Row(
            f"Goodput on 17 hours of AWS g4dn.xlarge, us-east-1c, {row['workers']:,} workers, "
            f"{row['changes']} changes",
            f"{row['elastic_dp']:.3f}; dropped batch {row['dropped batch']:.3f}; restart "
            f"{row['restart, as fast as measured']:.3f}",
        )


def data_images(r: dict[str, Any]) -> Iterator[Row]:
    images = {
        name: found["median"]
        for name, found in r["images_per_s"].items()
        if isinstance(found, dict)
    }
    for order in ("in order", "shuffled"):
        others = {
            PEERS[who]: images[f"{who}, {order}"] for who in PEERS if f"{who}, {order}" in images
        }
        parquet, tar = (images[f"ours, {name}, {order}"] for name in ("parquet", "tar"))
        yield Row(
            f"JPEG images of 224 x 224 a second, {order}",
            f"{parquet} (Parquet), {tar} (tar); "
            + ", ".join(f"{name} {n}" for name, n in others.items()),
            "ahead",
            min(parquet, tar) > max(others.values()),
        )


def packing_waste(r: dict[str, Any]) -> Iterator[Row]:
    for documents, found in r.items():
        ways = {name: way for name, way in found["ways"].items() if isinstance(way, dict)}
        wasted = {name: way["padding"] + way["dropped"] for name, way in ways.items()}
        ours = {name: count for name, count in wasted.items() if name.startswith("ours")}
        others = {name: count for name, count in wasted.items() if name not in ours}
        yield Row(
            f"Tokens padded or dropped of {found['tokens']:,}: {documents}",
            "; ".join(f"{name} {count:,}" for name, count in (ours | others).items()),
            "ours, `tail=short`, at most the others'",
            ours["ours, tail=short"] <= min(others.values()),
        )
    for documents, found in r.items():
        padding = {name: way["padding_percent"] for name, way in found["padded"].items()}
        yield Row(
            f"Padding of micro-batches of 8 for each 100 tokens, {documents}",
            "; ".join(f"{name} {percent:.1f}" for name, percent in padding.items()),
        )


def fuzz_data(r: dict[str, Any]) -> Iterator[Row]:
    yield Row(
        f"Damaged files of {len(r['kinds'])} kinds, read, converted and inspected: crashes, hangs, "
        "errors of others and rows that differ",
        f"{r['findings']} in {r['inputs']:,} files",
        "0 in 100,000",
        r["findings"] == 0 and r["inputs"] >= 100_000,
    )


def against_commit(r: dict[str, Any]) -> Iterator[Row]:
    from benchmarks.against_commit import ROUNDS, TARGET_RATIO
    from benchmarks.paired.memory import GRADIENT_BYTES

    words = {"step": "Step", "pause": "Pause", "data": "Data", "memory": "Peak memory"}
    limit = round(GRADIENT_BYTES / 1e6)
    for commit, parts in r.items():
        for part in ROUNDS:
            for case, found in parts.get(part, {}).items():
                for name, one in found["measured"].items():
                    low, high = one["interval"]
                    what = f"{words[part]}, {case}{f': {name}' if part == 'memory' else ''}"
                    what += f", beside `{commit}`, {one['rounds']} rounds"
                    if (busy := found["cores_busy_with_other_work"]) > 0.2:
                        what += f", {busy:.1f} cores busy with other work"
                    if one["unit"] == "bytes":
                        more = [round(x / 1e6) for x in (one["more_bytes"], low, high)]
                        measured = f"{more[0]} MB more [{more[1]}, {more[2]}]"
                        measured += f" than {one['then'] / 1e6:.0f} MB"
                        target = f"one gradient: {limit} MB"
                        yield Row(what, measured, target, low <= GRADIENT_BYTES)
                    else:
                        measured = f"{one['ratio']:.3f} [{low:.3f}, {high:.3f}]"
                        measured += f" of {one['then']:.2g} s"
                        most = TARGET_RATIO[part]
                        undecided = low <= most and high - low > 0.1
                        yield Row(what, measured, f"{most}", None if undecided else low <= most)


class Section(NamedTuple):
    title: str
    command: str
    rows: Callable[[Any], Iterator[Row]]
    note: str = ""


NOTE = (
    "The same workload with the package of an earlier commit and with this one, in turn, in the "
    "same environment; of times the ratio, of memory the difference. A target counts as missed "
    "where the whole interval is above it; one wider than 0.1 that contains it decides nothing. "
    "`f7ade70` opens data with fewer checks: since then, "
    "opening also looks for footers that would end the process, nulls, numbers that would be "
    "rounded and zeros that would be lost, and `convert` splits rows of CSV as "
    "training does. `b025e27` is the last commit that kept nothing of an aborted step."
)

SECTIONS = {
    "picture": Section("The first page", "benchmarks.picture", picture),
    "recovery": Section("A worker is killed", "benchmarks.recovery --peers", recovery),
    "recovery_gpt": Section(
        "A worker is killed on a full machine", "benchmarks.recovery_gpt", recovery_gpt
    ),
    "kill_in_step": Section("A kill within a long step", "benchmarks.kill_in_step", kill_in_step),
    "work_lost": Section(
        "Work that a kill costs",
        "benchmarks.work_lost",
        work_lost,
        "![How many micro-batches are lost by one kill](assets/work-lost.svg)\n\n"
        "Counted, not timed: each forward pass leaves a line. What died is what the killed worker "
        "had begun of its step.",
    ),
    "goodput_at_scale": Section(
        "The price of failures by the number of workers",
        "benchmarks.goodput_at_scale",
        goodput_at_scale,
        "![The price of failures for 8 to 16,384 workers](assets/goodput-at-scale.svg)\n\n"
        "**Simulated, not measured**: the real coordinator in simulated time, with pauses, copies "
        "and starts that other benchmarks measured with at most five workers, and the failures of "
        "Llama 3; the largest group with one failure of each kind. The command prints each "
        "assumption with its source. One of them is kinder than the defaults are: heartbeats come "
        "each second, above 8,000 workers each 6 seconds (`FailureConfig` has 4 a second unless "
        "told otherwise). The message that forms a group, 0.7 MB with 16,384 members, is "
        "serialized once for all. The dropped batch and the restart are arithmetic on the same "
        "assumptions; the batch that is dropped is not trained on.",
    ),
    "device_pause": Section(
        "Pauses with slow communicators, on a simulated device",
        "benchmarks.device_pause",
        device_pause,
    ),
    "join": Section("A worker joins", "benchmarks.join", join),
    "planned": Section("Planned changes", "benchmarks.planned", planned),
    "notice": Section("Spot notices", "benchmarks.notice", notice),
    "silence": Section("Silent nodes", "benchmarks.silence", silence),
    "spot": Section(
        "Spot capacity",
        "benchmarks.spot",
        spot,
        "Goodput is the number of committed steps, divided by what groups of the size of "
        "each instant make when nothing happens. "
        "The values vary: three runs gave 0.968 to 0.991, 0.984 to 1.00 and 0.965 to 0.999, "
        "with medians "
        "0.978, 0.993 and 0.968. The last trace changes every 3.5 s.",
    ),
    "step_overhead": Section(
        "Steps beside DDP",
        "benchmarks.step_overhead",
        step_overhead,
        "Our steps and DDP's are taken in turn, in the same processes, on the same rows. A "
        "target counts as missed where the whole "
        "interval is above it.",
    ),
    "compression": Section(
        "Rounded gradients",
        "benchmarks.compression",
        compression,
        "Two workers on two hosts, network namespaces of this machine, joined by an emulated link. "
        "Bytes are those that the first host's device sends, with headers and acknowledgements.",
    ),
    "compression_loss": Section(
        "Loss with settings for slow links",
        "benchmarks.compression_loss",
        compression_loss,
        "![Training loss with settings for slow links and without](assets/compression.svg)\n\n"
        "A GPT of 1.03 million parameters on the source of Python's standard library, two virtual "
        "workers with a row of 128 bytes each, with the same seeds. With `inner_steps`, steps are "
        "inner steps, whose moments go on whole; delayed gradients are those of predicted weights. "
        "The loss at the end is that of the final weights on 512 rows that no run trains on. "
        "The curves are those of the training loss, with bands from the least to the "
        "largest of the seeds. [Slow links](slow-links.md#what-they-cost-in-loss) has the rates.",
    ),
    "diloco_kills": Section(
        "Inner steps under kills",
        "benchmarks.diloco_kills",
        diloco_kills,
        "Two islands on two hosts, network namespaces of this machine, joined by an emulated link "
        "of 1 Gb/s and 25 ms; 8 inner steps between two exchanges; a GPT of 0.9 million "
        "parameters; torchft's DiLoCo beside ours, on the same machine in turn. With one worker "
        "left ours runs both islands, and torchft one of them. Replacements start on the same two "
        "cores: ours from a process that has imported torch, torchft's from nothing.",
    ),
    "sharding": Section("Steps with a sharded optimizer", "benchmarks.sharding", sharding),
    "sharding_memory": Section(
        "Memory with a sharded optimizer",
        "benchmarks.sharding_memory",
        sharding_memory,
        "AdamW, in fp32 unless it says otherwise, each worker with one row. What the peak of a "
        "worker's memory has beyond that before its model is made, the largest of all workers; "
        "activations and libraries' code that is first used in training are in it. "
        "[The formula](sharding.md#memory).",
    ),
    "sharding_changes": Section(
        "Losses of workers with a sharded optimizer",
        "benchmarks.sharding_changes",
        sharding_changes,
    ),
    "telemetry_overhead": Section(
        "Steps with and without telemetry",
        "benchmarks.telemetry_overhead",
        telemetry_overhead,
        "`ctx.log` in each step, journal, TensorBoard, times by phase, goodput and metrics, on and "
        "off in turn in one run.",
    ),
    "first_five_minutes": Section(
        "The first five minutes",
        "benchmarks.first_five_minutes",
        first_five_minutes,
        "Each command ends with exit code 0. Installing depends on pip's cache and on the network.",
    ),
    "against_commit": Section(
        "This package beside earlier commits",
        "benchmarks.against_commit COMMIT",
        against_commit,
        NOTE,
    ),
    "balance": Section("Workers of different speed", "benchmarks.balance", balance),
    "soak": Section("A long run with faults", "benchmarks.soak", soak),
    "checkpoint": Section("Checkpoints", "benchmarks.checkpoint", checkpoint),
    "data": Section("Data", "benchmarks.data --peers", data),
    "data_cache": Section("A cache on the disk", "benchmarks.data_cache", data_cache),
    "data_images": Section("Images", "benchmarks.data --part images --peers", data_images),
    "packing_waste": Section("Packing", "benchmarks.packing_waste", packing_waste),
    "coordinator_scale": Section(
        "The coordinator", "benchmarks.coordinator_scale", coordinator_scale
    ),
    "simulation": Section("The simulator", "tests.simulation --seeds 7000000 7100000", simulation),
    "fuzz_data": Section("Damaged files", "benchmarks.fuzz_data --inputs 100000", fuzz_data),
    "command_line": Section("The command line", "benchmarks.command_line", command_line),
}


def page(results: Path = RESULTS) -> str:
    parts = [INTRODUCTION]
    for name, section in SECTIONS.items():
        if not (results / f"{name}.json").exists():
            continue  # not measured yet
        record = json.loads((results / f"{name}.json").read_text())
        found = record.get("results", record)
        parts.append(f"## {section.title}\n\n```bash\npython -m {section.command}\n```\n")
        parts.append(f"Measured on {record['date']}{hardware(record)}.\n")
        if section.note:
            parts.append(f"{section.note}\n")
        lines = ["| what | measured | target | |", "|---|---|---|---|"]
        for row in section.rows(found):
            verdict = {None: "", True: "met", False: "**missed**"}[row.met]
            lines.append(f"| {row.what} | {row.measured} | {row.target} | {verdict} |")
        parts.append("\n".join(lines) + "\n")
    parts.append(
        "Other results: how random each shuffle is, in "
        "[Shuffling](shuffling.md#how-random-is-each-shuffle); the plot of the spot "
        "traces, in `benchmarks/results/spot.svg`.\n"
    )
    return "\n".join(parts)


def hardware(record: dict[str, Any]) -> str:
    facts = record.get("hardware", record)
    words = [facts.get("cpu"), f"{facts['cores']} cores" if "cores" in facts else None]
    words.append(f"torch {facts['torch']}" if "torch" in facts else f"Python {facts['python']}")
    return ", " + ", ".join(word for word in words if word)


def readme(text: str, results: Path = RESULTS) -> str:
    """README's text, with the measured lines as the results have them."""
    before, head, after = text.partition(HEAD)
    return before + head + highlights(results) + after[after.index("\n\n") :]


def highlights(results: Path) -> str:
    found = {
        name: json.loads((results / f"{name}.json").read_text())["results"]
        for name in (
            *("recovery", "recovery_gpt", "work_lost", "join", "spot", "goodput_at_scale"),
            *("step_overhead", "telemetry_overhead", "checkpoint", "data_cache"),
            "first_five_minutes",
        )
    }
    kills, full = found["recovery"], found["join"]["with a standby"]["kill_to_full_size"]
    three = kills["3 workers"]["pause"]
    ray = kills["Ray Train, checkpoint each 20 steps, 3 workers"]["kills"]
    torchft = kills["torchft 0.2, tuned, 3 workers"]["pause"]["median_ms"]
    steps = [one for one in found["step_overhead"] if one["mode"] == "exact"]
    ratios = [one["ratio"] for one in steps]
    spot, stall = found["spot"][0], found["checkpoint"]["save"]["ratios"]["stall / dcp.async_save"]
    full_machine = [
        (one[OURS]["pause"]["median_ms"], one[PEER]["pause"]["median_ms"])
        for one in (found["recovery_gpt"][size] for size in SMALL)
    ]
    full_size = [
        found["recovery_gpt"][size][whose]["full_size_again"]["median_ms"] / 1e3
        for whose in (OURS, PEER)
        for size in SMALL
    ]
    lost, died = found["work_lost"]["elastic_dp"], found["work_lost"]["what died"]
    scale = next(row for row in found["goodput_at_scale"]["failures"] if row["workers"] == 4096)
    price = {name: 1 - row["goodput"] for name, row in scale.items() if isinstance(row, dict)}
    cache = [one["ratio"] for one in found["data_cache"].values() if isinstance(one, dict)]
    lines = (
        (
            f"pause after SIGKILL of a worker, 3 workers, {three['count']} kills",
            f"median {three['median_ms']:.0f} ms (tuned torchft {torchft:.0f} ms; Ray Train "
            f"{min(k['to_new_step_s'] for k in ray):.0f} to "
            f"{max(k['to_new_step_s'] for k in ray):.0f} s)",
            "benchmarks.recovery --peers",
        ),
        (
            "the same where a GPT of 2 or 4 blocks keeps all cores busy",
            "median {:.0f} or {:.0f} ms (tuned torchft {:.0f} or {:.0f} ms)".format(
                *(us for us, _ in full_machine), *(them for _, them in full_machine)
            ),
            "benchmarks.recovery_gpt",
        ),
        (
            "the same, until a new worker trains in place of the killed one",
            "median {:.1f} or {:.1f} s (tuned torchft {:.1f} or {:.1f} s)".format(*full_size),
            "benchmarks.recovery_gpt",
        ),
        (
            f"micro-batches lost by a kill of one of 4 workers, {lost['kills']} kills",
            f"{lost['mean']:.1f} on average (the killed worker had begun {died['mean']:.1f})",
            "benchmarks.work_lost",
        ),
        (
            f"from a kill to full size with a standby, {full['count']} kills",
            f"median {full['median_ms']:.0f} ms",
            "benchmarks.join",
        ),
        (
            "exact step beside DDP, 0.9M to 25.5M parameters",
            f"{min(ratios):.2f} to {max(ratios):.2f} of its time",
            "benchmarks.step_overhead",
        ),
        (
            "step with ten times all telemetry beside one without",
            f"{found['telemetry_overhead'][0]['ratio']:.3f} of its time",
            "benchmarks.telemetry_overhead",
        ),
        (
            "useful steps on 17 hours of AWS spot capacity, compressed, of what is possible",
            (
                f"{spot['goodput']:.1%} ({spot['goodput_all_restarted']:.0%} if all are "
                "restarted at each change)"
            ),
            "benchmarks.spot",
        ),
        (
            "share of the time that failures cost 4,096 workers, simulated",
            f"{price['elastic_dp']:.2%} (dropped batch {price['dropped batch']:.2%}, restart "
            f"{price['restart, as fast as measured']:.1%})",
            "benchmarks.goodput_at_scale",
        ),
        (
            "time that a checkpoint takes from the loop, beside torch's `async_save`",
            f"{stall['median']:.2f}",
            "benchmarks.checkpoint",
        ),
        (
            "second epoch from a far store, kept on the disk, beside local shards",
            f"{min(cache):.2f} to {max(cache):.2f} of their speed",
            "benchmarks.data_cache",
        ),
        (
            "from an empty environment to the report of a run with a killed worker",
            f"{found['first_five_minutes']['total_s']:.0f} s",
            "benchmarks.first_five_minutes",
        ),
    )
    return "\n".join(
        f"| {what} | {measured} | `python -m {command}` |" for what, measured, command in lines
    )


if __name__ == "__main__":
    PAGE.write_text(page())
    README.write_text(readme(README.read_text()))
    print(PAGE)

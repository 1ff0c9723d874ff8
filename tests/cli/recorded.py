"""Folders of runs as they are after a night: one that goes on, one that ended, one that failed."""

import json
import time

from elastic_dp.run_record import Result, RunLimits, write_result
from tests.report.journals import T0, command, event, night
from tests.report.test_report_reader import write

FAILED = "w1 raised KeyError: 'x'\n\x1b[31mred"  # as a worker may word it


def recorded(folder, name, lines, total=None):
    write(folder / name, lines)
    (folder / name / "run.json").write_text("{}")
    start = {"code": "c", "python": "3", "limits": {"max_steps": total}, "total_steps": total}
    (folder / name / "start.json").write_text(json.dumps(start))


def shifted(lines, end):
    """The same lines, so that the last one is at `end`."""
    by = end - lines[-1]["time"]
    return [line | {"time": line["time"] + by} for line in lines]


def runs_after_a_night(folder):
    """Return the folder, with three runs."""
    lines = night()
    at = next(i for i, line in enumerate(lines) if line["time"] >= T0 + 9)
    recorded(folder, "going", shifted(lines[:at], time.time()), 20)
    recorded(folder, "night", lines, 6)
    url = str(folder / "night")
    write_result(url, Result("night", url, 6, "enough", "0", True), RunLimits(max_steps=6))
    failed = [*lines[:16], command(20, "FailRun", error=FAILED, traceback="", worker="w1")]
    recorded(folder, "broken", [*failed, event(20, "WorkerFailed", worker="w1", error=FAILED)])
    return folder

"""`elastic-dp top` in a terminal of its own, and without one."""

import contextlib
import fcntl
import io
import json
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time

import pytest
from typer.testing import CliRunner

from elastic_dp.cli import app, top_command
from elastic_dp.cli.run_sources import MOST_DECISIONS, StoredRun, newest_decisions
from elastic_dp.errors import StorageError
from tests.cli.recorded import runs_after_a_night
from tests.patience import PATIENCE_S
from tests.report.journals import T0, command, explain
from tests.report.test_report_reader import write

ALTERNATE, USUAL = "\x1b[?1049h", "\x1b[?1049l"


class Terminal:
    """A process in a terminal of 100 columns and 40 lines."""

    def __init__(self, *words, rows=40, columns=100):
        self.ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        env = {k: v for k, v in os.environ.items() if k not in ("COLUMNS", "LINES", "NO_COLOR")}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "elastic_dp.cli", *map(str, words)],
            env=env | {"TERM": "xterm-256color"},
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
        )
        os.close(theirs)
        self.text = ""

    def until(self, words):
        """Read until the words are there."""
        end = time.monotonic() + PATIENCE_S
        while words not in self.text:
            assert time.monotonic() < end, self.text
            if select.select([self.ours], [], [], 1.0)[0]:
                try:
                    self.text += os.read(self.ours, 1 << 16).decode(errors="replace")
                except OSError:  # it has ended
                    assert words in self.text, self.text

    def end(self):
        """The exit code, and what was drawn after the terminal was left."""
        code = self.process.wait(PATIENCE_S)
        with contextlib.suppress(OSError):
            while select.select([self.ours], [], [], 0)[0] and (more := os.read(self.ours, 65536)):
                self.text += more.decode(errors="replace")
        os.close(self.ours)
        return code, self.text.rpartition(USUAL)[2]


@pytest.fixture
def runs(tmp_path):
    return runs_after_a_night(tmp_path)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_top_draws_all_runs_until_a_signal_and_leaves_the_terminal_as_it_was(runs, number):
    terminal = Terminal("top", "--storage-path", runs, "--interval", 0.2)
    terminal.until(ALTERNATE)
    terminal.until("going")
    (runs / "going" / "run.json").rename(runs / "going" / "away")
    terminal.until("2 runs")  # drawn again
    terminal.process.send_signal(number)
    code, after = terminal.end()
    assert (code, after.strip("\x1b[?25h\r\n ")) == (0, "")
    assert "Traceback" not in terminal.text


def test_top_of_one_run_follows_its_events_and_ends_with_it(runs):
    terminal = Terminal("top", "going", "--storage-path", runs, "--interval", 0.2)
    terminal.until("needs a look")
    now = time.time() - T0
    write(runs / "going", [explain(now, "the cable is back")])
    terminal.until("the cable is back")
    end = command(now, "FinishRun", position=[20, 1, 0], digest="0", reason="enough")
    write(runs / "going", [end])
    code, after = terminal.end()
    assert code == 0 and "Traceback" not in terminal.text
    plain = re.sub(r"\x1b\[[0-9;?]*[a-z]", "", after)
    assert "going: finished: enough" in plain and "20 of 20 (100 %)" in plain


def asked(*words, code=0):
    runner = CliRunner(env={"FORCE_COLOR": None, "RAY_ADDRESS": None})
    said = runner.invoke(app, [str(word) for word in words], catch_exceptions=False)
    assert said.exit_code == code, said.output
    return said.stdout


def test_top_without_a_terminal_prints_one_frame_with_concerns_first(runs):
    text = asked("top", "--storage-path", runs)
    first, _, *lines = text.splitlines()
    assert first == f"3 runs at {runs}: 1 needs a look, 1 failed, 1 finished"
    assert [line.split()[0] for line in lines] == ["going", "broken", "night"]
    assert "\x1b" not in text


def test_top_of_one_run_without_a_terminal_prints_its_workers_and_decisions(runs):
    text = asked("top", "going", "--storage-path", runs)
    assert text.startswith("going: needs a look: 2 of 3 workers train\n")
    assert re.search(r"^w1 +training +node-1", text, re.M)
    assert re.search(r"^\d\d:\d\d:\d\d +generation 2 ends: 1 worker joins$", text, re.M)
    assert json.loads(asked("top", "going", "--json", "--storage-path", runs))["step"] == 4
    assert len(json.loads(asked("top", "--json", "--storage-path", runs))) == 3


def test_top_shows_the_newest_checkpoint_among_decisions_and_no_older_one():
    texts = ["2 workers join"]
    texts += [f"checkpoint of step {step} is committed" for step in range(100)]
    texts += ["w1 leaves", "checkpoint of step 100 is being written"]
    decisions = newest_decisions([*enumerate(texts)])
    assert decisions == [(0, texts[0]), (100, texts[100]), (101, texts[101]), (102, texts[102])]
    many = newest_decisions([(at, "w1 leaves") for at in range(1000)])
    assert (many[-1][0], len(many)) == (999, MOST_DECISIONS)


def test_top_of_an_unknown_run_suggests_one(runs):
    said = CliRunner().invoke(app, ["top", "goin", "--storage-path", str(runs)])
    assert said.exit_code == 2 and "Did you mean 'going'?" in said.stderr


@pytest.mark.parametrize("height", [8, 12, 30])
def test_frame_of_many_runs_and_workers_is_no_higher_than_the_terminal(runs, height):
    seen = StoredRun("going", str(runs), None).look() * 40
    out = top_command.Console(width=200, height=height, force_terminal=True, record=True)
    with out.capture() as captured:
        out.print(top_command._frame(StoredRun("going", str(runs), None), seen, False, "", out))
    lines = captured.get().splitlines()
    assert len(lines) <= height and f"and {40 - (height - 3)} more runs" in lines[-1]


def test_top_keeps_the_last_frame_and_says_so_where_the_store_is_away(runs, monkeypatch):
    frames = []

    class Source(StoredRun):
        def look(self):
            if frames:
                raise StorageError("the store is away")
            return super().look()

    def frame(source, seen, one, error, out):
        frames.append((seen[0].overview.name, error))
        if error:
            raise KeyboardInterrupt
        return ""

    source = Source("going", str(runs), None)
    monkeypatch.setattr(top_command, "_frame", frame)
    out = top_command.Console(file=io.StringIO(), force_terminal=True)
    assert top_command._watch(source, source.look(), True, 0.0, out) is None
    assert frames == [("going", ""), ("going", "the store is away")]

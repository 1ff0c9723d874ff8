"""The record of a run goes on where a killed controller left it, in the files and for those who
follow."""

import json
import math
import time
import uuid
from types import SimpleNamespace

import pytest

from elastic_dp.coordinator.messages import Explain, Signature, WorkerReady
from elastic_dp.storage import Store
from elastic_dp.storage.obstore_backend import ObstoreBackend
from elastic_dp.telemetry import journal as module
from elastic_dp.telemetry.journal import Journal
from elastic_dp.telemetry.journal_reader import JournalTail, read_events
from tests.patience import eventually


def said(lines):
    """The events, then the metrics."""
    return sorted(
        (line.get("text", line.get("step")) for line in lines), key=lambda x: isinstance(x, int)
    )


def wait_for_file(url, file, count):
    """Wait for so many lines. Return the store and the newest object with lines."""
    store = Store(url)

    def written():
        root = store.path.rstrip("/")
        segments = [e.path for e in store.find(f"{root}/journal/") if f"/{file}-" in e.path]
        found = [p for p in (f"{root}/{file}.jsonl", *segments) if store.look_up(p)]
        lines = sum(len(bytes(store.read_all(path)).splitlines()) for path in found)
        return found if lines >= count else None

    return store, eventually(written)[-1]


@pytest.fixture(params=["file", "memory"])
def url(request, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "_PAUSE_S", 0.0)
    return str(tmp_path / "run") if request.param == "file" else f"memory://{uuid.uuid4()}"


def test_a_clock_that_is_set_back_hides_no_line_and_turns_none_round(url, monkeypatch):
    clock = iter([100.0, 5000.0, 1400.0, 1401.0])
    ours = SimpleNamespace(time=lambda: next(clock), monotonic=time.monotonic)
    monkeypatch.setattr(module, "time", ours)  # the journal's, and no other thread's
    journal = Journal(url)
    for step in (0, 1, 2, 3):
        journal.metrics(step, {})
    journal.close()
    again = Journal(url, since=4999.0)
    again.close()
    assert [line["step"] for line in again.recorded()] == [1, 2, 3]


def test_follower_of_a_journal_reads_each_line_once(url):
    earlier = Journal(url)
    earlier.command(Explain("an earlier start"))
    earlier.close()
    written = earlier.since(None, 0.0)[1][-1]["time"]  # rounded, as `since` is
    began = eventually(lambda: (now := time.time()) > written + 0.001 and now)
    first = Journal(url)
    for step in (1, 2):
        first.metrics(step, {})
    first.command(Explain("written"))
    wait_for_file(url, "events", 2)
    wait_for_file(url, "metrics", 2)
    first.command(Explain("said, and lost with the process"))
    first.metrics(3, {})
    position, lines = first.since(None, 1.0)
    assert said(lines) == ["written", "said, and lost with the process", 1, 2, 3]
    for file, count in (("events", 3), ("metrics", 3)):
        store, path = wait_for_file(url, file, count)
        store.write(path, bytes(store.read_all(path))[:-5])  # the last line was not finished

    second = Journal(url, since=began)
    assert said(second.since(None, 1.0)[1]) == ["written", 1, 2]
    assert [line["step"] for line in second.recorded()] == [1, 2]
    assert second.since(position, 0.0)[1] == []
    second.metrics(3, {})  # a worker tells it again
    second.metrics(4, {})
    second.command(Explain("took over"))
    assert said(second.since(position, 1.0)[1]) == ["took over", 4]
    second.close()

    third = Journal(url, since=began)
    assert said(third.since(None, 1.0)[1]) == ["written", "took over", 1, 2, 3, 4]
    third.close()
    wait_for_file(url, "metrics", 5)
    assert [line["step"] for line in JournalTail(Store(url)).lines_of("metrics")] == [1, 2, 3, 4]
    first.close()


def test_journal_on_an_object_store_sends_each_line_a_bounded_number_of_times(monkeypatch):
    monkeypatch.setattr(module, "_PAUSE_S", 0.0)
    monkeypatch.setattr(module, "_SEGMENT_BYTES", 2000)
    url, steps = f"memory://{uuid.uuid4()}", 300
    former = Store(url)
    former.write(
        f"{former.path}/metrics.jsonl", b'{"time": 1.0, "step": 0}\n'
    )  # of a former version
    sent, write = [], Store.write
    monkeypatch.setattr(
        Store,
        "write",
        lambda store, path, content: (sent.append(content), write(store, path, content)),
    )
    tail = JournalTail(Store(url))
    journals = [Journal(url), Journal(url)]  # a thawed controller and its successor
    followed = []
    for step in range(1, steps + 1):
        journals[step % 2].metrics(step, {})
        while len(followed) <= step // 2:
            followed += tail.lines()
    for journal in journals:
        journal.close()
    assert max(map(len, sent)) < 2000 + 100
    size = sum(len(content) for content in sent)
    assert size < 2000 * (2 * steps + 10)  # whole files are 20 times as much
    followed += tail.lines()
    for lines in (followed, list(read_events(url))):
        assert sorted(line["step"] for line in lines) == list(range(steps + 1))
    assert next(iter(Journal(url, since=0.0).recorded()))["step"] == 0


class Away:
    """A store whose file operations fail so often."""

    def __init__(self, monkeypatch, times, says="503"):
        self.left, self.says = times, says
        for name in ("read", "write"):
            monkeypatch.setattr(ObstoreBackend, name, self.failing(getattr(ObstoreBackend, name)))
        monkeypatch.setattr(module, "_AGAIN_S", 0.01)
        monkeypatch.setattr(module, "_PAUSE_S", 0.0)

    def failing(self, method):
        def operation(backend, *args):
            self.left -= 1
            if self.left >= 0:
                raise OSError(self.says)
            return method(backend, *args)

        return operation


@pytest.mark.parametrize("takes_over", [False, True])
def test_a_store_that_is_away_at_the_start_loses_nothing(monkeypatch, takes_over):
    url, began = f"memory://{uuid.uuid4()}", time.time()
    earlier = Journal(url)
    earlier.command(Explain("earlier"))
    earlier.metrics(1, {})
    earlier.close()
    Away(monkeypatch, times=5)
    journal = Journal(url, since=began if takes_over else None)
    assert [line["step"] for line in journal.recorded()] == [1] * takes_over
    journal.command(Explain("later"))
    journal._queue.put(None)  # and not closed, for then each is tried once more only
    journal._writer.join()
    assert said(read_events(url)) == ["earlier", "later", 1]


def test_a_store_that_was_away_is_written_to_as_before(monkeypatch):
    """The pause between two writes grows with how long one takes, not with how long none does."""
    url = f"memory://{uuid.uuid4()}"
    journal = Journal(url)
    wait = journal._closing.wait
    pauses: list[float] = []
    monkeypatch.setattr(journal._closing, "wait", lambda s: pauses.append(s) or wait(min(s, 0.01)))
    away = Away(monkeypatch, times=100)  # more than a second
    for text in ("meanwhile", "later"):
        journal.command(Explain(text))
        eventually(lambda text=text: text in said(read_events(url)) if away.left <= 0 else False)
    journal.close()
    assert max(pauses) < 10


def test_a_journal_is_closed_where_the_store_stays_away(monkeypatch):
    Away(monkeypatch, times=10**9)
    journal = Journal(f"memory://{uuid.uuid4()}")
    journal.command(Explain("nobody will read this"))
    journal.close()
    assert not journal._writer.is_alive()


def test_a_store_that_echoes_a_secret_does_not_bring_it_into_the_last_words(monkeypatch, capsys):
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "canary-of-the-journal")
    Away(monkeypatch, times=10**9, says="503 for canary-of-the-journal")
    journal = Journal(f"memory://{uuid.uuid4()}")
    journal.command(Explain("nobody will read this"))
    journal.close()
    said = capsys.readouterr().err
    assert "the journal of the run is incomplete" in said and "503" in said
    assert "canary" not in said


def written_with(write, monkeypatch, tmp_path, lines):
    """Two texts, with another `_write`, until so many lines are there; what is read back."""
    monkeypatch.setattr(module, "_AGAIN_S", 0.01)
    monkeypatch.setattr(module, "_write", write)
    journal = Journal(str(tmp_path))
    for text in ("one", "two"):
        journal.command(Explain(text))
    wait_for_file(str(tmp_path), "events", lines)
    journal.close()
    return said(Journal(str(tmp_path), since=0.0).since(None, 1.0)[1])


def test_a_disk_that_was_full_goes_on_with_a_line_of_its_own(monkeypatch, tmp_path):
    left, write = [3], module._write

    def full(file, content):
        left[0] -= 1
        if left[0] >= 0:
            return write(file, content[:5])
        return write(file, content)

    assert written_with(full, monkeypatch, tmp_path, lines=3) == ["one", "two"]


def test_a_line_of_which_only_the_end_did_not_fit_is_there_once(monkeypatch, tmp_path):
    refused, write = [], module._write

    def full(file, content):
        if refused:
            return write(file, content)
        refused.append(content)
        return write(file, content[:-1])

    assert written_with(full, monkeypatch, tmp_path, lines=2) == ["one", "two"]
    assert refused and (tmp_path / "events.jsonl").read_text().count('"one"') == 1


def test_lines_that_fit_on_a_full_disk_are_there_once(tmp_path, monkeypatch):
    """Several at once, of which the disk takes two and a half."""
    write, path = module._write, tmp_path / "metrics.jsonl"
    file = module._LocalFile(str(path))
    for step in (1, 2, 3):
        file.add(json.dumps({"time": 1.0, "step": step}))
    monkeypatch.setattr(module, "_write", lambda file, content: write(file, content[:70]))
    with pytest.raises(OSError, match="only some"):
        file.write()
    assert [json.loads(line)["step"] for line in file._rest] == [3]
    monkeypatch.setattr(module, "_write", write)
    file.write()
    assert [line["step"] for line in read_events(str(tmp_path))] == [1, 2, 3] and not file._rest


def test_journal_of_a_signature_leaves_out_the_compressed_layout():
    journal = Journal(None)
    journal.event(WorkerReady("w1", Signature("layout", "data", "kind", (), b"lines"), True))
    [(*_, line)] = journal._kept
    assert json.loads(json.dumps(line))["signature"] == ["layout", "data", "kind", []]


def test_numbers_that_json_does_not_have_are_written_as_json_and_read_back(url):
    journal = Journal(url)
    journal.metrics(1, {"loss": math.nan, "most": math.inf, "inner": [-math.inf]})
    journal.close()
    store, path = wait_for_file(url, "metrics", 1)
    line = json.loads(bytes(store.read_all(path)), parse_constant=pytest.fail)
    assert (line["loss"], line["most"], line["inner"]) == ("NaN", "Infinity", ["-Infinity"])
    (line,) = read_events(url)
    assert math.isnan(line["loss"]) and line["most"] == math.inf and line["inner"] == [-math.inf]


@pytest.mark.parametrize(
    "content",
    [
        b"[]\n",
        b"{}\n5\nnull\n",
        b"\xff\xfe\n",
        b"[" * 100_000,
        b'{"time": NaN, "step": 2}\n{"time": 1e400, "step": 2}\n{"time": 2, "step": -1e12}\n',
    ],
)
def test_lines_that_are_none_of_ours_are_left_out(url, content):
    journal = Journal(url)
    journal.metrics(1, {})
    journal.close()
    store, path = wait_for_file(url, "metrics", 1)
    store.write(path, content + bytes(store.read_all(path)))
    again = Journal(url, since=0.0)
    again.close()
    assert [line["step"] for line in again.recorded()][-1:] == ([] if b"[[" in content else [1])

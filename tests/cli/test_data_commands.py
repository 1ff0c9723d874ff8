"""The command line, and what `inspect` finds: each fault by a data set that has it."""

import importlib
import json
import shutil
import subprocess
import sys
from importlib.metadata import version

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from elastic_dp.checkpoint.catalog import Catalog
from elastic_dp.checkpoint.lease import Lease
from elastic_dp.cli import entry_point
from elastic_dp.cluster.runs import ended_run as ended_run_module
from elastic_dp.cluster.runs.ended_run import EndedRun
from elastic_dp.run_record import Result, RunLimits, write_result
from elastic_dp.storage import Store
from tests.checkpoint.states import save, train_state

GOOD = {"compression": "none", "use_dictionary": False, "write_statistics": False}


def run(*arguments, code=0):
    result = CliRunner().invoke(entry_point.app, [str(a) for a in arguments])
    assert result.exit_code == code, result.output
    return result


def shard(folder, columns, name="part-0.parquet", rows=256, **settings):
    folder.mkdir(exist_ok=True)
    pq.write_table(pa.table(columns), folder / name, row_group_size=rows, **GOOD | settings)
    return folder


# --- the command line


def test_convert_and_inspect_print_json_and_nothing_else(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"id":1,"x":2,"y":3}\n' * 100)
    arguments = ("data", "convert", tmp_path / "a.jsonl", tmp_path / "out", "--json")
    made = run(*arguments, "--columns", "id, y", "--row-group-bytes", 80)
    assert json.loads(made.stdout)["row_groups"] > 5 and made.stderr == ""
    shape = ("--virtual-workers", 2, "--micro-batch-size", 5)
    said = json.loads(run("data", "inspect", tmp_path / "out", "--json", *shape).stdout)
    assert (said["rows"], said["plan"]["steps_per_epoch"]) == (100, 10)
    assert said["columns"] == [["id", "int64"], ["y", "int64"]]
    assert {f["name"] for f in said["findings"]} == {"few_row_groups"}


def test_convert_and_inspect_print_a_summary_for_people(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "some words"}\n' * 100)
    (tmp_path / "b.py").write_text("")
    arguments = ("data", "convert", tmp_path, tmp_path / "out")
    made = run(*arguments, "--tokenizer", "bytes", "--pack", 64).stdout
    assert "100 documents of 1 files → 17 rows, 1 row groups, 1 shards" in made
    assert "12 last tokens" in made and "files that were not read: 1 .py" in made
    said = run("data", "inspect", tmp_path / "out", "--virtual-workers", 1, "--micro-batch-size", 2)
    assert "1 arrow shards" in said.stdout and "columns: tokens (list<" in said.stdout
    assert "8 steps per epoch of 2 rows, 1 rows left over" in said.stdout
    assert "slow: 1 row groups for 8 streams" in said.stdout


def test_inspect_of_data_that_training_refuses_exits_with_1(tmp_path):
    assert "refused: DataConfig.url" in run("data", "inspect", tmp_path / "none", code=1).stdout
    said = run("data", "inspect", tmp_path / "none", "--json", code=1)
    assert [one["kind"] for one in json.loads(said.stdout)["findings"]] == ["refused"]


def test_convert_takes_a_query(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"x":1,"y":null}\n{"x":2,"y":3}\n')
    query = ("--query", "SELECT x FROM rows WHERE y IS NULL")
    made = run("data", "convert", tmp_path / "a.jsonl", tmp_path / "out", *query).stdout
    assert made.startswith("2 rows of 1 files → 1 rows")
    assert pq.read_table(tmp_path / "out")["x"].to_pylist() == [1]


@pytest.mark.parametrize(
    ("option", "way_out"),
    [
        ("--rows-per-group", "set --row-group-bytes"),
        ("--fill-null", "set --query"),
        ("--csv-option", "give the rows of a reader of CSV to write_shards"),
        ("--text-glob", "name the files by a glob"),
        ("--format", "rows become Parquet"),
    ],
)
def test_options_of_convert_that_are_gone_say_what_to_write(option, way_out, tmp_path):
    said = run("data", "convert", tmp_path, tmp_path / "out", option, "1", code=2).stderr
    assert "any more" in said and way_out in said


def test_errors_are_one_line_and_code_2(tmp_path):
    result = run("data", "convert", tmp_path, "x", code=2)
    assert result.stdout == "" and result.stderr.count("\n") == 1
    assert result.stderr.startswith("no file at") and "Traceback" not in result.output
    assert "go together" in run("data", "inspect", "x", "--virtual-workers", 2, code=2).stderr


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (("data", "convert", "EMPTY", "x"), "DataError: no file at"),
        (("checkpoints", "list", "EMPTY", "--verify"), "CheckpointError: "),
        (("status", "mine", "--storage-path", "EMPTY"), "ClusterError: no run named 'mine' is at"),
        (("run", "SCRIPT", "--set", "nonsense"), "SpecError: "),
        (("run", "SCRIPT", "--", "words", "--json"), None),
        (("data", "inspect"), "UsageError: Missing argument 'URL'"),
        (("data", "inspect", "x", "--virtual-workers", 0), "UsageError: Invalid value for"),
        (("logs", "mine", "--nobody"), "UsageError: No such option: --nobody"),
        (("nothing",), "UsageError: No such command 'nothing'"),
    ],
)
def test_errors_with_json_are_json_and_have_the_same_exit_code(arguments, error, tmp_path):
    script = tmp_path / "script.py"
    script.write_text("raise SystemExit(2)")
    (tmp_path / "empty").mkdir()
    there = {"EMPTY": str(tmp_path / "empty"), "SCRIPT": str(script)}
    arguments = [there.get(word, word) for word in arguments]
    plain = run(*arguments, code=2)
    assert plain.stdout == ""
    if error is None:  # this --json is the script's
        return
    told = run(*arguments, "--json", code=2)
    facts = json.loads(told.stdout)
    assert facts.keys() == {"exit_code", "error"} and told.stderr == ""
    assert facts["exit_code"] == 2 and facts["error"].startswith(error), facts


def test_version_is_that_of_the_package():
    assert run("--version").stdout == f"elastic_dp {version('elastic_dp')}\n"


@pytest.fixture(scope="module")
def ended_run(tmp_path_factory):
    """The storage path of a run with a checkpoint, events and logs that has ended, and a data set
    beside it."""
    path = tmp_path_factory.mktemp("runs")
    store, url = Store(str(path / "mine")), str(path / "mine")
    holder = Lease(store, "a host", "token", wall=lambda: 0.0)
    holder.acquire()
    catalog = Catalog(store)
    catalog.claim(1, None)
    save(catalog, train_state(7), 7, metrics={"loss": 0.5})
    result = Result("mine", url, 7, "the last step", "0", True, metrics={"loss": 0.5})
    write_result(url, result, RunLimits())
    (path / "mine" / "run.json").write_text('{"virtual_workers": 4}')
    said = [{"time": t, "command": "Explain", "text": f"words {t}"} for t in (1.0, 3.0)]
    (path / "mine" / "events.jsonl").write_text("".join(f"{json.dumps(w)}\n" for w in said))
    (path / "mine" / "metrics.jsonl").write_text('{"time": 2.0, "step": 7, "loss": 0.5}\n{"time"')
    (path / "mine" / "logs").mkdir()
    for worker in ("w1", "w10", "w2", "w2.last"):
        (path / "mine" / "logs" / f"{worker}.log").write_text(f"{worker} 1\n{worker} 2\n")
    holder.release()
    shard(path / "data", {"id": range(100)})
    return path


# What each may import of what is slow to import, out of these.
SLOW = {"ray", "torch", "pyarrow", "numpy"}
WITHOUT_RAY = {
    "--help": set(),
    "--version": set(),
    "status --help": set(),
    "data convert --help": set(),
    "data inspect data": {"pyarrow", "numpy"},
    "data convert data converted": {"pyarrow", "numpy"},
    "checkpoints list mine": set(),
    "checkpoints list mine --verify": set(),
    "status mine --storage-path .": set(),
    "logs mine --storage-path .": set(),
    "status --storage-path .": set(),
}


# A page of help, and a command of each group; the others go the same ways.
IN_CI = (
    *(
        "--help",
        "data inspect data",
        "data convert data converted",
        "checkpoints list mine --verify",
    ),
    *("status mine --storage-path .", "status --storage-path ."),
)


@pytest.mark.parametrize(
    "command",
    [pytest.param(c, marks=() if c in IN_CI else pytest.mark.slow) for c in WITHOUT_RAY],
)
def test_commands_that_need_no_cluster_import_neither_ray_nor_torch(command, ended_run):
    """Each takes seconds to import."""
    look = (
        "import sys; from elastic_dp import cli\n"
        "try: cli.main()\n"
        f"finally: print(*sorted({SLOW!r} & set(sys.modules)), file=sys.stderr)"
    )
    words = [sys.executable, "-c", look, *command.split()]
    done = subprocess.run(words, cwd=ended_run, capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout, done.stderr
    assert set(done.stderr.split()) <= WITHOUT_RAY[command], done.stderr


def test_events_of_an_ended_run_are_in_the_order_of_their_time(ended_run):
    there = ("logs", "mine", "--events", "--storage-path", ended_run)
    lines = [json.loads(line) for line in run(*there, "--json").stdout.splitlines()]
    assert [line["time"] for line in lines] == [1.0, 2.0, 3.0]
    assert lines[1] == {"time": 2.0, "step": 7, "loss": 0.5}
    assert run(*there, "--follow").stdout.count("\n") == 3


def test_logs_of_an_ended_run_are_those_of_all_its_workers(ended_run):
    there = ("logs", "mine", "--storage-path", ended_run)
    every = [f"{w}  {w} {n}" for w in ("w1", "w2", "w2.last", "w10") for n in (1, 2)]
    assert run(*there).stdout.splitlines() == every
    last = run(*there, "--worker", "w2", "--tail", 1, "--json").stdout.splitlines()
    assert [json.loads(line) for line in last] == [
        {"worker": "w2", "line": "w2 2"},
        {"worker": "w2.last", "line": "w2.last 2"},
    ]
    refused = run(*there, "--worker", "w3", code=2).stderr
    assert "worker is 'w3', must be one of those in" in refused and "w1, w2, w10" in refused


@pytest.fixture
def live_folder(ended_run, monkeypatch):
    """The folder of a run whose cluster does not answer here. Each poll of a follower
    is one call of a function that the test sets."""
    path = ended_run / "followed"
    shutil.copytree(ended_run / "mine", path / "mine")
    store = Store(str(path / "mine"))
    holder = Lease(store, "another", "token 3", wall=lambda: 0.0)
    holder.acquire()
    polls = []

    def poll(_):
        polls.pop(0)()
        if not polls:
            holder.release()

    monkeypatch.setattr(ended_run_module.time, "sleep", poll)
    yield path, polls
    shutil.rmtree(path)


def add_to(path, text):
    with open(path, "a") as file:
        file.write(text)


def test_events_of_a_folder_are_followed_until_its_lease_is_released(live_folder):
    path, polls = live_folder
    file = path / "mine" / "events.jsonl"
    line = json.dumps({"time": 4.0, "command": "Explain", "text": "words 4.0"}) + "\n"
    polls += [lambda: add_to(file, line[:9]), lambda: add_to(file, line[9:]), lambda: None]
    run_here = EndedRun("mine", path)
    assert [each["time"] for each in run_here.events(follow=True)] == [1.0, 2.0, 3.0, 4.0]
    assert not polls


def test_logs_of_a_folder_are_followed_until_its_lease_is_released(live_folder):
    path, polls = live_folder
    logs = path / "mine" / "logs"
    polls += [
        lambda: add_to(logs / "w2.log", "w2 2\nnew\n"),
        lambda: (logs / "w3.log").write_text("first\n"),
        lambda: (logs / "w3.last.log").write_text("first\nlast\n"),
    ]
    lines = list(EndedRun("mine", path).logs(tail=1, follow=True))
    before = [(w, f"{w} 2") for w in ("w1", "w2", "w2.last", "w10")]
    after = [("w2", "w2 2"), ("w2", "new"), ("w3", "first"), ("w3.last", "last")]
    assert lines == before + after


def test_list_of_a_storage_path_says_how_its_runs_ended(ended_run):
    (row,) = json.loads(run("status", "--storage-path", ended_run, "--json").stdout)
    assert (row["name"], row["phase"], row["step"]) == ("mine", "over", 7)
    assert "finished after step 7" in run("status", "--storage-path", ended_run).stdout


def test_a_run_without_a_result_is_unfinished_and_says_its_last_words(ended_run, monkeypatch):
    from elastic_dp.cluster.ray import cluster_connection
    from elastic_dp.cluster.runs import attach

    asked = []
    monkeypatch.setattr("ray.is_initialized", lambda: False)  # by another test of this process
    monkeypatch.setattr(cluster_connection, "connect", asked.append)
    monkeypatch.setattr(cluster_connection, "clusters_of_this_user", list)
    monkeypatch.setattr(attach, "attach_live", lambda name, url: None)
    monkeypatch.setattr(attach, "names", list)
    there = ("status", "mine", "--storage-path", ended_run, "--json")
    fields = set(json.loads(run(*there).stdout))
    (ended_run / "mine" / "result.json").rename(ended_run / "mine" / "away")
    try:
        status = json.loads(run(*there).stdout)
        assert set(status) == fields
        assert (status["phase"], status["step"]) == ("unfinished", 7)
        assert status["reason"] == "it has no result; the last event is: words 3.0" and not asked
        store = Store(str(ended_run / "mine"))
        holder = Lease(store, "another", "token 2", wall=lambda: 0.0)
        holder.acquire()  # it may train somewhere, so the cluster is asked
        assert "another holds its lease" in json.loads(run(*there).stdout)["reason"]
        limits = {"max_steps": 9, "epochs": None, "max_time_s": None, "stopped": False}
        start = {"format": 1, "code": "", "python": "3.11", "limits": limits, "ray": "far:6379"}
        (ended_run / "mine" / "start.json").write_text(json.dumps(start))
        # Who writes there must not learn the token that is sent to clusters.
        assert "at far:6379: --address asks" in json.loads(run(*there).stdout)["reason"]
        assert asked == [None, None]
        holder.release()
    finally:
        (ended_run / "mine" / "away").rename(ended_run / "mine" / "result.json")


def test_status_without_a_cluster_says_how_an_ended_run_is_found(monkeypatch):
    """The local Ray of a script ends with it, so this is what its user meets who asks how the run
    ended."""

    def refuse(**settings):
        raise ConnectionError("Could not find any running Ray instance.")

    from elastic_dp.cluster.ray import cluster_connection

    monkeypatch.setattr("ray.is_initialized", lambda: False)  # by another test of this process
    monkeypatch.setattr(cluster_connection, "clusters_of_this_user", list)
    monkeypatch.setattr("ray.init", refuse)
    for verb in ("status", "logs"):
        assert "elastic-dp status RUN --storage-path URL" in run(verb, "mine", code=2).stderr


def test_checkpoints_list_of_a_wrong_folder_names_it_and_says_which_is_meant(tmp_path):
    said = run("checkpoints", "list", tmp_path / "runs").stdout
    assert (
        f"no committed checkpoints at {tmp_path}/runs; a run's folder is its storage_path/name"
        in said
    )


def test_help_has_what_is_needed(tmp_path):
    assert "convert" in run("data", "--help").stdout
    assert "Default" in run("data", "convert", "--help").stdout


@pytest.mark.parametrize("package", ["typer"])
def test_a_missing_extra_is_named(monkeypatch, capsys, package):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(SystemExit) as end:
        importlib.reload(entry_point)
    assert end.value.code == 2
    line = capsys.readouterr().err
    assert line == f"elastic-dp needs {package.split('.')[0]}: pip install 'elastic_dp[cli]'\n"

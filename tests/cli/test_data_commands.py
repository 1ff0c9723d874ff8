"""The command line, and what `inspect` finds: each fault by a data set that has it."""

import contextlib
import gzip
import importlib
import json
import shutil
import subprocess
import sys
from importlib.metadata import version

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from elastic_dp.checkpoint.catalog import Catalog
from elastic_dp.checkpoint.lease import Holder, Lease
from elastic_dp.cli import entry_point
from elastic_dp.cluster.runs import ended_run as ended_run_module
from elastic_dp.cluster.runs.ended_run import EndedRun
from elastic_dp.config import DataConfig
from elastic_dp.data import open_data, read_index
from elastic_dp.dataprep import convert, inspect
from elastic_dp.dataprep.inspection import findings
from elastic_dp.errors import DataError
from elastic_dp.run_record import Result, RunLimits, write_result
from elastic_dp.storage import Store
from tests.checkpoint.states import save, train_state

GOOD = {"compression": "none", "use_dictionary": False, "write_statistics": False}


def run(*arguments, code=0):
    result = CliRunner().invoke(entry_point.app, [str(a) for a in arguments])
    assert result.exit_code == code, result.output
    return result


def tokens(rows, length=2048, kind=np.int32, fixed=True):
    values = pa.array(np.random.default_rng(0).integers(0, 50_000, rows * length).astype(kind))
    if fixed:
        return pa.FixedSizeListArray.from_arrays(values, length)
    return pa.ListArray.from_arrays(np.arange(0, rows * length + 1, length, dtype=np.int32), values)


def shard(folder, columns, name="part-0.parquet", rows=256, **settings):
    folder.mkdir(exist_ok=True)
    pq.write_table(pa.table(columns), folder / name, row_group_size=rows, **GOOD | settings)
    return folder


def found(folder, *names, **settings):
    """The findings, which are exactly these."""
    said = inspect(str(folder), **settings).findings
    assert sorted(f.name for f in said) == sorted(names), said
    return said


def test_inspect_has_no_findings_for_what_convert_writes(tmp_path):
    source = shard(tmp_path / "source", {"tokens": tokens(4096, fixed=False), "id": range(4096)})
    convert(str(source), str(tmp_path / "out"))
    result = inspect(str(tmp_path / "out"), virtual_workers=2, micro_batch_size=10)
    assert result.findings == ()
    assert (result.rows, result.shards, result.format) == (4096, 1, "parquet")
    text, numbers = result.columns
    assert (text.name, numbers.name, numbers.type) == ("tokens", "id", "int64")
    assert 1.9 * 2**20 < text.decoded.median < 2.1 * 2**20
    assert result.plan.global_batch == 20 and result.plan.steps_per_epoch == 204
    assert result.plan.dropped_rows == 16
    assert result.plan.streams == 16
    assert 2 * 8 * 2 < result.plan.virtual_worker_bytes / 2**20 < 3 * 8 * 2  # also while decoded
    assert result.plan.all_bytes == pytest.approx(2 * result.plan.virtual_worker_bytes, abs=1)


def test_large_row_groups_and_the_command_that_fixes_them(tmp_path):
    folder = shard(tmp_path / "set", {"tokens": tokens(4096)}, rows=4096)
    large, few = sorted(
        found(folder, "large_row_groups", "few_row_groups"), key=lambda f: -len(f.message)
    )
    assert "have 32 MiB in column 'tokens'" in large.message and "here 256 rows" in large.message
    command = f"elastic-dp data convert {folder} {folder}-converted --rows-per-group 256"
    assert large.fix == command and "1 row groups for 8 streams" in few.message
    run(*command.split()[1:])
    found(f"{folder}-converted")


def test_small_row_groups(tmp_path):
    folder = shard(tmp_path / "set", {"id": range(100_000)}, rows=1000)
    (small,) = found(folder, "small_row_groups")
    assert "row groups have 7.84 KiB (median of 100)" in small.message
    assert small.fix.endswith("--rows-per-group 12500")


def test_few_row_groups_for_the_virtual_workers(tmp_path):
    folder = shard(tmp_path / "set", {"tokens": tokens(4096)})
    found(folder)
    (few,) = found(folder, "few_row_groups", virtual_workers=8, micro_batch_size=1)
    assert "16 row groups for 64 streams" in few.message and few.fix.endswith("--rows-per-group 64")


def test_virtual_workers_that_share_a_stream(tmp_path):
    """Row groups so large that fewer of them than virtual workers may be open."""
    folder = shard(tmp_path / "set", {"tokens": tokens(4096)})
    shape = {"virtual_workers": 1024, "micro_batch_size": 1}
    shared, few = found(folder, "shared_streams", "few_row_groups", **shape)
    plan = inspect(str(folder), **shape).plan
    assert plan.streams < 1024 and f"{plan.streams} of them fit into the 512 MiB" in shared.message
    assert f"up to {-(-1024 // plan.streams)} times the traffic" in shared.message
    assert "--rows-per-group 1" in shared.fix and few.kind == "slow"
    with open_data_of(folder, 1024) as data:
        assert data._order.streams == plan.streams  # as training has it


def open_data_of(folder, virtual_workers):
    config = DataConfig(str(folder), micro_batch_size=1, memory_bytes=8 << 30)
    opened = open_data(config, virtual_workers=virtual_workers)
    return contextlib.closing(opened)


def test_a_job_that_is_too_large_for_the_data_or_the_memory(tmp_path, monkeypatch):
    folder = shard(tmp_path / "set", {"tokens": tokens(4096)})
    (few,) = found(folder, "too_few_rows", virtual_workers=2, micro_batch_size=4000)
    assert (
        few.kind == "refused" and "4096 rows are fewer than one global batch of 8000" in few.message
    )
    monkeypatch.setattr(DataConfig, "memory_bytes", 32 << 20)
    (memory,) = found(folder, "memory")
    assert memory.kind == "refused" and "has up to 9 row groups open" in memory.message
    with pytest.raises(DataError, match="has up to 9 row groups open"):
        open_data(
            DataConfig(str(folder), micro_batch_size=1, memory_bytes=32 << 20), virtual_workers=1
        )


def test_row_groups_of_uneven_sizes(tmp_path):
    values = pa.table({"tokens": tokens(9216)})
    with pq.ParquetWriter(tmp_path / "a.parquet", values.schema, **GOOD) as writer:
        writer.write_table(values.slice(0, 4096), row_group_size=256)
        writer.write_table(values.slice(4096), row_group_size=8192)
    (uneven,) = found(tmp_path, "uneven_row_groups")
    assert "the largest takes" in uneven.message


def test_many_small_shards(tmp_path, monkeypatch):
    monkeypatch.setattr(findings, "MANY_SHARDS", 3)
    for number in range(3):
        folder = shard(tmp_path / "set", {"tokens": tokens(256)}, f"{number}.parquet")
    found(folder, "few_row_groups", "small_shards")


def test_compressed_text_is_one_row_group(tmp_path):
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(b'{"a": 1}\n' * 1000))
    packed, scan = sorted(found(tmp_path, "compressed_text", "scan"), key=lambda f: f.name)
    assert "1 shards are compressed (a.jsonl.gz" in packed.message and "reads all" in scan.message


def test_shards_are_judged_as_training_judges_them(tmp_path):
    """Structs are read by their leaves; a column that only a later shard has is refused."""
    points = pa.array([{"x": 1.0, "when": None}] * 4096)
    folder = shard(tmp_path / "set", {"tokens": tokens(4096), "point": points}, "a.parquet")
    (none,) = found(folder, "no_tensor")
    assert "'point.when' is null" in none.message
    found(folder, columns=["tokens", "point.x"])
    shard(folder, {"tokens": tokens(4096), "point": points, "more": range(4096)}, "b.parquet")
    said = str(found(folder, "no_tensor", "nulls"))
    assert (
        "'more' (int64) holds 4096 nulls, the first in a.parquet (a.parquet has none of its values)"
        in said
    )
    with pytest.raises(DataError, match=r"'point\.when' is null"):
        read_index(DataConfig(str(folder), micro_batch_size=1))
    with pytest.raises(
        DataError, match=r"'more' \(int64\) holds 4096 nulls, the first in a\.parquet"
    ):
        read_index(DataConfig(str(folder), micro_batch_size=1, columns=["tokens", "more"]))


def test_heavy_compression_and_dictionaries_of_tokens(tmp_path):
    columns = {"tokens": tokens(4096), "word": pa.array(["a", "b"] * 2048)}
    found(shard(tmp_path / "a", columns, compression="zstd"), "slow_codec")
    found(shard(tmp_path / "b", columns, use_dictionary=True), "dictionary")
    found(shard(tmp_path / "c", columns, use_dictionary=["word"]))


def test_inspect_finds_large_footers(tmp_path):
    raw = pa.array([bytes(4096)] * 4096, pa.binary(4096))
    found(shard(tmp_path / "a", {"tokens": raw}, write_statistics=True), "large_footers")
    found(shard(tmp_path / "b", {"tokens": raw}))


@pytest.mark.parametrize("first", [(1, 2), (2, 2)])
def test_inspect_finds_ragged_lists(tmp_path, first):
    """Also where each row group has a whole number of values per row."""
    lists = [[0] * first[0], [0] * first[1]] + [[0], [0, 0, 0]] * 4095
    folder = shard(tmp_path / "set", {"a": lists}, rows=1024)
    (ragged,) = found(folder, "ragged")
    assert ragged.kind == "refused" and "DataConfig.collate_fn" in ragged.fix
    later = shard(tmp_path / "later", {"a": [[0, 0]] * 4096 + [[0, 0, 0]] * 4096}, rows=1024)
    found(later, "ragged")
    same = shard(tmp_path / "same", {"a": [[1, 2]] * 8192}, rows=1024)
    found(same)


def test_nulls_and_types_without_a_tensor(tmp_path):
    columns = {
        "x": pa.array([1.0, None] * 16_384),
        "text": pa.array(["a", None] * 16_384),
        "when": pa.nulls(32_768),
        "words": pa.array([[None]] * 32_768),
    }
    folder = shard(tmp_path / "set", columns, rows=4096, write_statistics=True)
    findings = found(folder, "nulls", "no_tensor", "no_tensor")
    assert "'x' (double) holds 16384 nulls" in " ".join(f.message for f in findings)
    (few,) = found(
        folder, "few_row_groups", columns=["text"], virtual_workers=8, micro_batch_size=1
    )
    assert 'shuffle="full"' in few.fix


def test_schemas_that_differ_and_shards_without_rows(tmp_path):
    folder = shard(tmp_path / "set", {"tokens": tokens(4096)}, "a.parquet")
    shard(folder, {"tokens": tokens(0)}, "b.parquet")
    (empty,) = found(folder, "empty_shards")
    assert (
        empty.kind == "slow"
        and "1 of 2 shards hold no row, and are skipped: b.parquet" in empty.message
    )
    shard(folder, {"tokens": tokens(256, kind=np.uint64)}, "c.parquet")
    differ = next(
        f for f in found(folder, "schemas_differ", "empty_shards") if "int64" in f.message
    )
    assert "int32>[2048] in a.parquet and list<uint64>[2048] in c.parquet" in differ.message
    nothing = shard(tmp_path / "nothing", {"tokens": tokens(0)})
    found(nothing, "no_rows")


def test_shards_that_a_folder_url_leaves_out(tmp_path):
    (tmp_path / "set").mkdir()
    shard(tmp_path / "set" / "sub", {"tokens": tokens(4096)})
    found(tmp_path / "set", "nested")
    found(tmp_path / "set" / "**")


@pytest.mark.parametrize(
    ("name", "finding"),
    [
        ("a.jsonl", "scan"),
        ("a.csv", "scan"),
        ("a.tar", "scan"),
        ("a.txt", "no_shards"),
        ("c/a.png", "no_shards"),
    ],
)
def test_formats_without_row_groups(tmp_path, name, finding):
    (tmp_path / name).parent.mkdir(exist_ok=True)
    content = {"a.csv": "x" * 1997 + "\n1\n", "a.jsonl": '{"a": 1}' + " " * 1992}
    (tmp_path / name).write_text(content.get(name, "x" * 2000))
    (said,) = found(tmp_path, finding)
    assert "1.95 KiB" in said.message or finding == "no_shards"
    assert "elastic-dp data convert" in said.fix or name == "a.tar"
    assert "rows not counted" in run("data", "inspect", tmp_path).stdout


def test_inspect_reads_arrow_files(tmp_path):
    shard(tmp_path / "set", {"tokens": tokens(4096, kind=np.uint16)})
    convert(str(tmp_path / "set"), str(tmp_path / "out"), format="arrow", rows_per_group=256)
    result = inspect(str(tmp_path / "out"))
    assert (result.findings, result.rows, result.row_groups) == ((), 4096, 16)
    assert result.columns[0].decoded.max >= 256 * 4096
    some = pa.table({"a": [1]})
    with pa.ipc.new_stream(tmp_path / "stream.arrow", some.schema) as stream:
        stream.write_table(some)
    (streams,) = found(tmp_path / "stream.arrow", "scan")
    assert streams.kind == "slow" and "walks through all of 1 shards" in streams.message
    ragged = pa.table({"a": [[1], [1, 2]] * 40_000})
    (tmp_path / "ragged").mkdir()
    with pa.ipc.new_file(tmp_path / "ragged" / "a.arrow", ragged.schema) as file:
        file.write_table(ragged, max_chunksize=10_000)
    found(tmp_path / "ragged", "ragged")


# --- the command line


def test_convert_and_inspect_print_json_and_nothing_else(tmp_path):
    (tmp_path / "a.csv").write_text("id,x,y\n" + "1,2,3\n" * 100)
    arguments = ("data", "convert", tmp_path / "a.csv", tmp_path / "out", "--json")
    made = run(*arguments, "--columns", "id, y", "--rows-per-group", 10)
    assert json.loads(made.stdout)["row_groups"] == 10 and made.stderr == ""
    shape = ("--virtual-workers", 2, "--micro-batch-size", 5)
    said = json.loads(run("data", "inspect", tmp_path / "out", "--json", *shape).stdout)
    assert (said["rows"], said["plan"]["steps_per_epoch"]) == (100, 10)
    assert [column["name"] for column in said["columns"]] == ["id", "y"]
    assert {f["name"] for f in said["findings"]} == {"few_row_groups"}


def test_convert_and_inspect_print_a_summary_for_people(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "some words"}\n' * 100)
    arguments = ("data", "convert", tmp_path / "a.jsonl", tmp_path / "out")
    made = run(*arguments, "--tokenizer", "bytes", "--pack", 64, "--compression", "zstd")
    assert "17 rows, 1 row groups, 1 shards" in made.stdout and "12 last tokens" in made.stdout
    said = run("data", "inspect", tmp_path / "out", "--virtual-workers", 1, "--micro-batch-size", 2)
    assert (
        "1 arrow shards" in said.stdout
        and "8 steps per epoch of 2 rows, 1 rows left over" in said.stdout
    )
    assert "slow: 1 row groups for 8 streams" in said.stdout


def test_convert_and_inspect_say_what_they_did_not_read_and_how_to(tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    (source / "a.txt").write_text("text")
    for name in ("b.py", "c.py"):
        (source / name).write_text("x = 1")
    packed = ("--tokenizer", "bytes", "--pack", 1)
    made = run("data", "convert", source, tmp_path / "one", *packed).stdout
    assert "not read: 2 files: 2 .py (such as b.py)\n" in made and "--text-glob '*.ENDING'" in made
    assert "not read: 2 files: 2 .py (such as b.py)\n" in run("data", "inspect", source).stdout
    globs = ("--text-glob", "*.py", "--text-glob", "*.txt")
    made = run("data", "convert", source, tmp_path / "two", *packed, *globs).stdout
    assert made.startswith("17 rows") and "not read" not in made
    told = run("data", "convert", source, tmp_path / "three", *packed, "--json").stdout
    assert json.loads(told)["skipped"] == [
        {"ending": ".py", "files": 2, "examples": ["b.py", "c.py"]}
    ]


def test_errors_are_one_line_and_code_2(tmp_path):
    for arguments in (("inspect", tmp_path), ("convert", tmp_path, "x")):
        result = run("data", *arguments, code=2)
        assert result.stdout == "" and result.stderr.count("\n") == 1
        assert result.stderr.startswith("no file at") and "Traceback" not in result.output
    assert "go together" in run("data", "inspect", "x", "--virtual-workers", 2, code=2).stderr


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (("data", "inspect", "EMPTY"), "DataError: no file at"),
        (("data", "convert", "EMPTY", "x"), "DataError: no file at"),
        (("checkpoints", "verify", "EMPTY"), "CheckpointError: "),
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
    holder = Holder(store, Lease("a host", "token"), lambda: 0.0, lambda: 0.0)
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
    "checkpoints verify mine": set(),
    "status mine --storage-path .": set(),
    "logs mine --storage-path .": set(),
    "status --storage-path .": set(),
}


# A page of help, and a command of each group; the others go the same ways.
IN_CI = (
    *("--help", "data inspect data", "data convert data converted", "checkpoints verify mine"),
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
    holder = Holder(store, Lease("another", "token 3"), lambda: 0.0, lambda: 0.0)
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
    monkeypatch.setattr(cluster_connection, "connect", asked.append)
    monkeypatch.setattr(cluster_connection, "clusters_of_this_user", list)
    monkeypatch.setattr(attach, "attach_live", lambda name, url: None)
    there = ("status", "mine", "--storage-path", ended_run, "--json")
    fields = set(json.loads(run(*there).stdout))
    (ended_run / "mine" / "result.json").rename(ended_run / "mine" / "away")
    try:
        status = json.loads(run(*there).stdout)
        assert set(status) == fields
        assert (status["phase"], status["step"]) == ("unfinished", 7)
        assert status["reason"] == "it has no result; the last event is: words 3.0" and not asked
        store = Store(str(ended_run / "mine"))
        holder = Holder(store, Lease("another", "token 2"), lambda: 0.0, lambda: 0.0)
        holder.acquire()  # it may train somewhere, so the cluster is asked
        assert "another holds its lease" in json.loads(run(*there).stdout)["reason"]
        assert asked == [None]
        holder.release()
    finally:
        (ended_run / "mine" / "away").rename(ended_run / "mine" / "result.json")


def test_status_without_a_cluster_says_how_an_ended_run_is_found(monkeypatch):
    """The local Ray of a script ends with it, so this is what its user meets who asks how the run
    ended."""

    def refuse(**settings):
        raise ConnectionError("Could not find any running Ray instance.")

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


def test_inspect_of_an_unknown_column_names_those_there_are(tmp_path):
    with pytest.raises(DataError, match=r"no column 'b' in part-0\.parquet, which has 'a'"):
        inspect(str(shard(tmp_path, {"a": [1]})), columns=["b"])


@pytest.mark.parametrize("package", ["typer", "rich.console"])
def test_a_missing_extra_is_named(monkeypatch, capsys, package):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(SystemExit) as end:
        importlib.reload(entry_point)
    assert end.value.code == 2
    line = capsys.readouterr().err
    assert line == f"elastic-dp needs {package.split('.')[0]}: pip install 'elastic_dp[cli]'\n"

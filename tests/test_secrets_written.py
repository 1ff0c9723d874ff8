"""A canary stands wherever a credential may; then data is converted, inspected and trained on, and
every byte is searched.

What is written or said: shards, the index and the record beside a run, events, metrics, logs,
warnings, standard output and error, and the message of every error with the traceback that a user
sees.
"""

import contextlib
import dataclasses
import json
import logging
import traceback
import warnings
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from typer.testing import CliRunner

from elastic_dp import DataConfig, ElasticTrainer, ScalingConfig, cli
from elastic_dp.dataprep import convert, inspect
from elastic_dp.errors import ElasticError
from elastic_dp.run_record import RunRecord
from elastic_dp.telemetry.journal import Journal
from elastic_dp.testing.process_worker_group import ProcessRun
from tests.patience import PATIENCE_S
from tests.storage.proxy import FaultProxy
from tests.storage.servers import answering_server, http_server
from tests.storage.test_secrets import CANARY, PLAIN_ECHO, TOLD, assert_silent, options


@pytest.fixture
def said(caplog, capfd):
    """A list to which is added what was logged, warned and printed."""
    texts: list[str] = []
    with warnings.catch_warnings(record=True) as warned, caplog.at_level(logging.DEBUG):
        warnings.simplefilter("always")
        yield texts
    texts += [str(w.message) for w in warned]
    texts += [r.getMessage() for r in caplog.records if r.name.startswith("elastic_dp")]
    texts += capfd.readouterr()
    assert_silent(texts)


def told(error: BaseException) -> list[str]:
    return [str(error), repr(error), *traceback.format_exception(error)]


def written(folder: Path) -> list[str]:
    files = [file for file in folder.rglob("*") if file.is_file()]
    assert files
    return [f"{file.name}\n{file.read_bytes().decode('latin-1')}" for file in files]


def signed(url: str, name: str) -> str:
    return f"{url.replace('://', f'://user:{TOLD}@')}/{name}?X-Amz-Signature={TOLD}"


def write_sources(folder: Path) -> None:
    (folder / "a.jsonl").write_text('{"id": 1, "text": "some words"}\n' * 50)
    (folder / "a.csv").write_text("id,x\n1,2\n" * 20)
    (folder / "a.txt").write_text("some words " * 50)
    (folder / "bad.jsonl").write_text("{")
    (folder / "a.bin").write_text("?")
    (folder / "a.tar").write_text("?")
    (folder / "bad.parquet").write_text("PAR1")
    pq.write_table(pa.table({"id": range(50)}), folder / "a.parquet")


NAMES = ["a.jsonl", "a.csv", "a.txt", "bad.jsonl", "a.bin", "a.tar", "bad.parquet", "a.parquet"]
NAMES += ["missing.csv", "*.parquet"]
INSPECTED = {"a.parquet": 0, "missing.csv": 2, "*.parquet": 2}  # exit codes; the others are refused


def attempt(said: list[str], call) -> bool:
    try:
        said.append(repr(call()))
    except ElasticError as error:
        said += told(error)
        return False
    return True


def test_conversion_and_inspection_of_signed_urls(tmp_path, said):
    (source := tmp_path / "source").mkdir()
    write_sources(source)
    done = []
    with http_server(source) as url:
        for number, name in enumerate(NAMES):
            how = {"tokenizer": "bytes", "pack": 16} if name == "a.txt" else {}
            out = tmp_path / "out" / str(number)
            if attempt(said, lambda n=name, o=out, h=how: convert(signed(url, n), str(o), **h)):
                done.append(name)
            attempt(said, lambda n=name: inspect(signed(url, n), columns=["no such"]))
            attempt(said, lambda n=name: inspect(signed(url, n)))
            for verb in (("inspect",), ("inspect", "--json"), ("convert", "--json")):
                to = [str(tmp_path / "cli" / str(number))] if verb[0] == "convert" else []
                result = CliRunner().invoke(
                    cli.app, ["data", verb[0], signed(url, name), *to, *verb[1:]]
                )
                codes = {0, 2} if verb[0] == "convert" else {INSPECTED.get(name, 1)}
                assert result.exit_code in codes, result.output
                said.append(result.output)
        attempt(said, lambda: convert(str(source / "a.jsonl"), signed(url, "out")))
        result = CliRunner().invoke(
            cli.app, ["data", "convert", str(source / "a.jsonl"), f"memory://x?sig={TOLD}/y"]
        )
        said.append(result.output)
    assert done == ["a.jsonl", "a.txt", "a.parquet"]
    said += written(tmp_path / "out") + written(tmp_path / "cli")


@pytest.mark.parametrize("status", [403, pytest.param(404, marks=pytest.mark.slow)])
def test_stores_that_echo_the_request_to_the_write_side(status, tmp_path, said, monkeypatch):
    """The credentials are in the environment."""
    (tmp_path / "a.csv").write_text("id\n1\n")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "somebody")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", CANARY)
    with answering_server(status, PLAIN_ECHO) as url:
        monkeypatch.setenv("AWS_ENDPOINT_URL", url)
        for call in (
            lambda: convert("s3://bucket/in/a.csv", str(tmp_path / "out")),
            lambda: convert(str(tmp_path / "a.csv"), "s3://bucket/out"),
            lambda: convert(signed(url, "a.csv"), str(tmp_path / "out")),
            lambda: inspect("s3://bucket/in"),
            lambda: inspect(signed(url, "a.parquet")),
            lambda: inspect("s3://bucket/in/*.parquet"),
        ):
            assert not attempt(said, call)


def train(ctx) -> None:
    model = torch.nn.Linear(4, 1)

    def loss_fn(model, batch):
        return model(batch["x"]).square().mean()

    for step in ctx.steps(model, torch.optim.SGD(model.parameters(), lr=0.1), loss_fn):
        ctx.log({"loss": step.loss})
        if ctx.config["fails"] and step.number == 3:
            raise ValueError("the user's own")


def rows(number: int) -> bytes:
    x = np.random.default_rng(number).standard_normal((32, 4)).astype(np.float32)
    table = pa.table({"x": pa.FixedSizeListArray.from_arrays(x.ravel(), 4)})
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, row_group_size=8)
    return sink.getvalue().to_pybytes()


@contextlib.contextmanager
def places(tmp_path: Path, moto: str):
    """Data on S3 behind a proxy that fails, and by a signed URL; the first shard of the second
    cannot be decoded."""
    (folder := tmp_path / "http").mkdir()
    bad = bytearray(rows(0))
    bad[200:260] = bytes(60)
    (folder / "bad.parquet").write_bytes(bad)
    (folder / "good.parquet").write_bytes(rows(1))
    (folder / "cut.parquet").write_bytes(rows(1)[:900])
    with http_server(folder) as files, FaultProxy(moto, {"error": 0.2}, retry_after_s=0) as proxy:
        more = options(proxy.url)
        bad_url, good_url = (signed(files, f"{name}.parquet") for name in ("bad", "good"))
        yield [
            DataConfig("s3://canary/set", micro_batch_size=4, storage_options=more),
            DataConfig("s3://canary/set", micro_batch_size=4, columns=["y"], storage_options=more),
            DataConfig(signed(files, "cut.parquet"), micro_batch_size=4),
            DataConfig([bad_url, good_url], micro_batch_size=4),
            DataConfig(
                {bad_url: 1, good_url: 2},
                micro_batch_size=4,
                max_bad_fraction=0.5,
            ),
            DataConfig(good_url, micro_batch_size=4),
        ]


def test_runs_and_what_lies_beside_them(tmp_path, bucket_of_canary, said):
    (runs := tmp_path / "runs").mkdir()
    results = []

    def keep(line):
        said.append(json.dumps(line, default=str))

    with places(tmp_path, bucket_of_canary) as sources:
        for number, data in enumerate(sources):
            trainer = ElasticTrainer(
                train,
                data=data,
                name=f"run-{number}",
                storage_path=str(runs),
                config={"fails": data.url == "s3://canary/set"},
                scaling=ScalingConfig(virtual_workers=2),
                max_steps=4,
                loggers=[keep],
            )
            try:
                results.append(trainer.fit(local=True))
            except Exception as error:  # of the package, or the user's own
                said += told(error)
        journal = Journal(str(runs / "group"))
        with ProcessRun(trainer.spec, train, journal=journal) as run:
            said.append(repr(run.wait(PATIENCE_S)))
        journal.close()
        assert "the user's own" in "".join(said)
        said.append(repr(run.controller.status()))
    assert len(results) == 2 and any(result.skipped for result in results)
    names = {file.name for file in runs.rglob("*")}
    assert {"run.json", "index.arrows", "metrics.jsonl", "events.jsonl", "result.json"} <= names
    said += written(runs) + [repr(result) for result in results]


@pytest.fixture
def bucket_of_canary(moto):
    """The endpoint of a server that has the shards of s3://canary/set."""
    from tests.storage.conftest import send

    send("PUT", f"{moto}/canary")
    for number in range(2):
        send("PUT", f"{moto}/canary/set/{number}.parquet", rows(number))
    return moto


def test_messages_about_a_configuration_contain_no_secret(tmp_path, said):
    url = signed("s3://bucket", "data")
    said.append(repr(DataConfig(url, micro_batch_size=1, storage_options={"secret": CANARY})))
    said.append(repr(DataConfig({url: 1.0}, micro_batch_size=1)))
    for wrong in (
        lambda: DataConfig([url, ""], micro_batch_size=1),
        lambda: DataConfig({url: -1.0}, micro_batch_size=1),
        lambda: DataConfig({url: 0}, micro_batch_size=1),
    ):
        assert not attempt(said, wrong)
    record = RunRecord(virtual_workers=8, micro_batch_size=1, seed=0, data="a", exact=True)
    at = f"memory://user:{TOLD}@runs/one"
    record.check_or_write(at, None)
    other = dataclasses.replace(record, seed=1)
    assert not attempt(said, lambda: other.check_or_write(at, None))
    assert "s3://bucket/data" in said[0] and "the run at memory://runs/one" in said[-1]

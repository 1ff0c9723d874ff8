"""Loggers of tools: each step once, over restarts of the driver and failures of the tool."""

import json
import math
import threading

import pytest

from elastic_dp.cluster import logger_threads
from elastic_dp.cluster.logger_threads import LoggerThreads, catch_up
from elastic_dp.errors import SpecError
from elastic_dp.integrations.mlflow import MLflowLogger
from elastic_dp.integrations.tensorboard import TensorBoardLogger
from elastic_dp.integrations.wandb import WandbLogger
from elastic_dp.telemetry import run_logger
from elastic_dp.telemetry.run_logger import LoggedSoFar, RunLogger
from tests.bad_input.jobs import trainer as trainer_of
from tests.patience import PATIENCE_S, eventually
from tests.train.jobs import logs_its_loss


def metrics(step, loss=None):
    return {"time": 100.0 + step, "step": step, "loss": 1.0 / step if loss is None else loss}


START = {"time": 100.0, "event": "ControllerStarted", "size": 2, "takes_over": False}
KILL = {"time": 103.5, "event": "WorkerLost", "worker": "w1", "reason": "killed", "cause": "node"}
COMMIT = {"time": 104.5, "event": "CheckpointCommitted", "step": 4}
RUN = [START, metrics(1), metrics(2), metrics(3), KILL, metrics(4), COMMIT, metrics(5)]
STEPS = [1, 2, 3, 4, 5]


def write(folder, lines):
    """Write a run's folder: a reader finds each file as it was, or whole."""
    folder.mkdir(exist_ok=True)
    for name in ("events", "metrics"):
        of = [
            json.dumps(line)
            for line in lines
            if ("step" in line and "loss" in line) is (name == "metrics")
        ]
        (folder / "written").write_text("".join(line + "\n" for line in of))
        (folder / "written").replace(folder / f"{name}.jsonl")


def drive(logger, folder, lines):
    """One driver, to whose end the folder has these lines."""
    write(folder, lines)
    LoggerThreads([logger], "mine", str(folder)).close()


def close_when(logger, folder, logged, then=None):
    """A driver whose end comes once these steps are logged, and those of a replaced folder."""
    threads = LoggerThreads([logger], "mine", str(folder))
    eventually(lambda: steps(logger) == logged)
    if then is not None:
        write(folder, then)
        eventually(lambda: len(steps(logger)) > len(logged))
    threads.close()


class Recorder(RunLogger):
    """Keeps what it gets, as a tool would: a new logger with the same `tool` continues there."""

    def __init__(self, tool=None, failures=()):
        self.tool = {"metrics": [], "events": []} if tool is None else tool
        self.failures = list(failures)
        self.opened = []

    def open(self, run, began):
        self.opened.append((run, began))
        steps = [step for step, _ in self.tool["metrics"]]
        events = [at for at, _ in self.tool["events"]]
        return LoggedSoFar(step=max(steps, default=-1), events_until=max(events, default=0.0))

    def log(self, at, step, metrics):
        if self.failures and self.failures[0] == step:
            del self.failures[0]
            raise OSError("the service is away")
        self.tool["metrics"].append((step, metrics["loss"]))

    def annotate(self, at, step, text):
        self.tool["events"].append((at, text))

    def close(self):
        pass


def steps(logger):
    return [step for step, _ in logger.tool["metrics"]]


@pytest.fixture(autouse=True)
def often(monkeypatch):
    for name in ("_LOCAL_S", "_GATHER_S"):
        monkeypatch.setattr(logger_threads, name, 0.01)


def test_driver_that_attaches_late_logs_what_the_folder_holds_and_then_what_comes(tmp_path):
    write(tmp_path / "run", RUN[:5])
    logger = Recorder()
    threads = LoggerThreads([logger], "mine", str(tmp_path / "run"))
    eventually(lambda: steps(logger) == STEPS[:3])
    write(tmp_path / "run", RUN)
    threads.close()
    assert steps(logger) == STEPS
    texts = [text.split(":")[0] for _, text in logger.tool["events"]]
    assert texts == ["start", "loss", "checkpoint"]


def test_driver_that_is_started_again_logs_no_step_and_no_event_twice(tmp_path):
    first = Recorder()
    drive(first, tmp_path / "run", RUN[:5])
    events = list(first.tool["events"])
    second = Recorder(first.tool)
    drive(second, tmp_path / "run", RUN)
    assert steps(second) == STEPS
    assert second.opened == [("mine", 100.0)]
    assert [e for e in second.tool["events"] if e[0] <= 103.5] == events


def test_run_that_ended_while_no_driver_was_there_is_logged_from_its_folder(tmp_path):
    write(tmp_path / "run", RUN)
    logger = Recorder()
    catch_up([logger], "mine", str(tmp_path / "run"))
    assert steps(logger) == STEPS


def test_steps_that_ran_again_after_a_rollback_are_logged_once(tmp_path):
    logger = Recorder()
    drive(logger, tmp_path / "run", [*RUN, metrics(4), metrics(5), metrics(6)])
    assert steps(logger) == [*STEPS, 6]


def test_tool_that_fails_is_reported_and_then_given_what_it_missed(tmp_path, monkeypatch):
    monkeypatch.setattr(logger_threads, "_AGAIN_S", 0.0)
    logger = Recorder(failures=[2, 4, 4])
    write(tmp_path / "run", RUN)
    with pytest.warns(UserWarning, match="'Recorder' raised OSError: the service is away"):
        close_when(logger, tmp_path / "run", STEPS)
    assert steps(logger) == STEPS and len(logger.opened) == 4


def test_folder_that_was_replaced_is_read_from_its_start(tmp_path, monkeypatch):
    monkeypatch.setattr(logger_threads, "_AGAIN_S", 0.0)
    logger = Recorder()
    write(tmp_path / "run", RUN)
    with pytest.warns(UserWarning, match="the journal is shorter than before"):
        close_when(logger, tmp_path / "run", STEPS, then=[START, metrics(6)])
    assert steps(logger) == [*STEPS, 6]


def test_logger_that_hangs_stops_neither_the_others_nor_the_driver(tmp_path, monkeypatch):
    monkeypatch.setattr(logger_threads, "CLOSE_S", 1.0)  # the others have logged by then
    released, logger, seen = threading.Event(), Recorder(), []

    class Hangs(Recorder):
        def open(self, run, began):
            released.wait()
            return super().open(run, began)

    write(tmp_path / "run", RUN)
    threads = LoggerThreads([Hangs(), logger, seen.append], "mine", str(tmp_path / "run"))
    for line in RUN:
        threads.put(line)
    eventually(lambda: steps(logger) == STEPS == [record["step"] for record in seen])
    with pytest.warns(UserWarning, match="'Hangs' raised TimeoutError: not all is logged"):
        threads.close()
    released.set()
    assert steps(logger) == STEPS
    assert [record["step"] for record in seen] == STEPS


def test_function_that_is_too_slow_is_reported_and_stops_nobody(tmp_path, monkeypatch):
    monkeypatch.setattr(logger_threads, "MAX_WAITING", 2)
    released, entered, seen = threading.Event(), threading.Event(), []

    def slow(record):
        seen.append(record["step"])
        entered.set()
        released.wait()

    threads = LoggerThreads([slow], "mine", str(tmp_path))
    threads.put(metrics(1))
    assert entered.wait(PATIENCE_S)
    for step in range(2, 20):
        threads.put(metrics(step))
    released.set()
    with pytest.warns(UserWarning, match="it was too slow for 16 lines"):
        threads.close()
    assert seen == [1, 2, 3]


def test_local_run_gives_each_step_to_a_logger_once(tmp_path):
    logger = Recorder()
    trainer_of(tmp_path, logs_its_loss, loggers=[logger]).fit(local=True)
    again = Recorder(logger.tool)
    trainer_of(tmp_path, logs_its_loss, loggers=[again]).fit(local=True)
    assert steps(again) == [1, 2, 3, 4]


def test_tool_that_is_not_installed_is_refused_before_the_run(monkeypatch):
    monkeypatch.setattr(run_logger.importlib.util, "find_spec", lambda name: None)
    for logger, extra in (
        (lambda: TensorBoardLogger("x"), "tensorboard"),
        (WandbLogger, "wandb"),
        (MLflowLogger, "mlflow"),
    ):
        with pytest.raises(SpecError, match=rf"pip install 'elastic_dp\[{extra}\]'"):
            logger()


# ------------------------------------------------------------------------------ real tools


def drivers(make, folder):
    """Two drivers, the second one after the end."""
    drive(make(), folder, RUN[:5])
    drive(make(), folder, RUN)


def test_tensorboard_has_each_step_once_and_the_events(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    drivers(lambda: TensorBoardLogger(tmp_path / "tb"), tmp_path / "run")
    [folder] = (tmp_path / "tb" / "mine").iterdir()
    [torn, _] = sorted(folder.iterdir())
    shown = EventAccumulator(str(folder)).Reload()
    assert [each.step for each in shown.Scalars("loss")] == STEPS
    assert [each.value for each in shown.Scalars("loss")] == pytest.approx([1 / s for s in STEPS])
    texts = [e.tensor_proto.string_val[0] for e in shown.Tensors("run_events/text_summary")]
    assert [text.split(b":")[0] for text in texts] == [b"start", b"loss", b"checkpoint"]
    torn.write_bytes(torn.read_bytes()[:-3])  # as a driver that was killed leaves it
    drive(TensorBoardLogger(tmp_path / "tb"), tmp_path / "run", [*RUN, metrics(6)])
    shown = EventAccumulator(str(folder)).Reload()
    assert [each.step for each in shown.Scalars("loss")] == [*STEPS, 6]


@pytest.mark.slow
def test_mlflow_has_each_step_once_and_the_events(tmp_path, monkeypatch):
    from mlflow.tracking import MlflowClient

    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    uri = (tmp_path / "mlflow").as_uri()
    drivers(lambda: MLflowLogger("tests", uri), tmp_path / "run")
    client = MlflowClient(uri)
    [run] = client.search_runs([client.get_experiment_by_name("tests").experiment_id])
    history = client.get_metric_history(run.info.run_id, "loss")
    assert [metric.step for metric in history] == STEPS
    assert (run.info.status, run.info.run_name) == ("FINISHED", "mine")
    text = next((tmp_path / "mlflow").rglob("run_events.txt")).read_text()
    assert [line.split("  ")[2].split(":")[0] for line in text.splitlines()] == [
        "start",
        "loss",
        "checkpoint",
    ]


@pytest.mark.parametrize("name", ["", "/a", "a//b", "../a", ".", "a/", "a:b%", "x" * 251, "ü"])
def test_name_that_mlflow_refuses_is_changed(name, tmp_path, monkeypatch):
    from mlflow.tracking import MlflowClient

    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    uri = (tmp_path / "mlflow").as_uri()
    logger = MLflowLogger("tests", uri)
    logger.open("mine", 5.0)
    logger.log(6.0, 1, {name: 1.0, "loss": math.nan})
    logger.close()
    client = MlflowClient(uri)
    [run] = client.search_runs([client.get_experiment_by_name("tests").experiment_id])
    assert len(run.data.metrics) == 2
    assert logger.open("mine", 5.0).last_step(name) == 1


class FakeWandbRun:
    """A fake of a run of `wandb` that is resumed: `step` is the one after the last row."""

    def __init__(self, server):
        self.server, self.summary = server, server["summary"]
        self.step = max(server["rows"], default=-1) + 1

    def log(self, values, step):
        assert step >= self.step
        self.server["rows"].setdefault(step, {}).update(values)
        self.step = step

    def finish(self, exit_code):
        self.server["codes"].append(exit_code)


def test_wandb_resumes_its_run_and_has_each_step_once(tmp_path, monkeypatch):
    import wandb

    server = {"rows": {}, "summary": {}, "codes": []}
    inits = []

    def init(**settings):
        inits.append(settings)
        return FakeWandbRun(server)

    monkeypatch.setattr(wandb, "init", init)
    drivers(lambda: WandbLogger("tests", mode="online"), tmp_path / "run")
    assert [step for step, row in server["rows"].items() if "loss" in row] == STEPS
    assert [i["id"] for i in inits] == ["mine-19700101-000140"] * 2
    assert [i["resume"] for i in inits] == ["allow", "allow"]
    assert server["codes"] == [0, 0]
    texts = [row["run_event"] for row in server["rows"].values() if "run_event" in row]
    assert sum(text.count("loss: w1 is lost") for text in texts) == 1


def test_wandb_refuses_the_arguments_that_resume_needs():
    with pytest.raises(SpecError, match="WandbLogger got id, resume"):
        WandbLogger(id="mine", resume="must")

"""A journal with one of each event of a report, written by hand."""

T0 = 1_790_000_000.0


def event(at, kind, **more):
    return {"time": T0 + at, "event": kind} | more


def command(at, kind, **more):
    return {"time": T0 + at, "command": kind} | more


def explain(at, text):
    return command(at, "Explain", text=text)


def form(at, generation, *members):
    return command(
        at, "FormGeneration", generation=generation, members=list(members), source=members[0]
    )


def stopped(at, worker, generation, step):
    return event(
        at, "WorkerStopped", worker=worker, generation=generation, position=[step, 0, 0], reason=""
    )


def lost(at, worker, reason="its process exits", cause="unknown"):
    return event(at, "WorkerLost", worker=worker, reason=reason, cause=cause, micro_batch=None)


def logged(at, step, **metrics):
    return {"time": T0 + at, "step": step} | metrics


def times(at, step, **workers):
    return event(at, "TimesReported", step=step, times={w: list(t) for w, t in workers.items()})


def night():
    """Three workers; one is killed, one has a notice and leaves, one joins; then an end."""
    return [
        event(0, "ControllerStarted", size=3, takes_over=False),
        explain(0, "starting 3 workers"),
        *(command(0, "StartWorker", worker=w) for w in ("w1", "w2", "w3")),
        event(0.1, "CheckpointFound", step=None),
        *(event(1, "WorkerPlaced", worker=w, location=["node-1", False]) for w in ("w1", "w2")),
        *(command(1, "BeginTraining", worker=w, is_source=w == "w1") for w in ("w1", "w2")),
        *(event(2, "WorkerReady", worker=w, can_source=True) for w in ("w1", "w2")),
        form(3, 1, "w1", "w2"),
        explain(3, "generation 1: 2 workers, state from w1"),
        logged(4, 1, loss=2.0, lr=0.1),
        logged(5, 2, loss=1.8, lr=0.1),
        times(6, 2, w1=(0.5, 1, 0.5, 0, 0, 1, 0), w2=(0.5, 1, 0.5, 0, 0, 1, 0)),
        lost(6, "w2"),
        explain(6, "generation 1 ends: w2 is lost: its process exits"),
        stopped(6.1, "w1", 1, 2),
        form(6.5, 2, "w1"),
        event(7, "WorkerReady", worker="w3", can_source=True),
        explain(7, "generation 2 ends: 1 worker joins"),
        stopped(7.5, "w1", 2, 3),
        form(7.6, 3, "w1", "w3"),
        command(8, "TakeCheckpoint", worker="w1"),
        logged(8, 4, loss=1.0, lr=0.1),
        event(8.5, "CheckpointCommitted", step=4, duration_s=0.5),
        lost(8.6, "w2", "its node was taken away", "preempted"),
        event(9, "DrainNoticed", worker="w3", deadline=123.0),
        command(9, "ReleaseWorker", worker="w3", reason="its node goes away"),
        explain(9.5, "generation 3 ends: w3 leaves"),
        stopped(9.6, "w3", 3, 5),
        form(9.7, 4, "w1"),
        lost(9.8, "w3", "left, as it was asked to", "released"),
        event(10, "SizeRequested", size=2, min_workers=None),
        event(11, "StopRequested", reason="enough"),
        times(12, 6, w1=(1, 4, 1, 1, 0.1, 1, 0.5)),
        command(12, "FinishRun", position=[6, 1, 0], digest="0", reason="enough"),
        explain(12, "finished after step 6: enough"),
        lost(12.1, "w1", "left, as it was asked to", "released"),
    ]

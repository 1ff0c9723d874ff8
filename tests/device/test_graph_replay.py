"""Replays of CUDA graphs: each micro-batch is an iteration of its own."""

import sys
import types
from functools import partial

import torch

from elastic_dp.device.graph_replay import begin_graph_iteration, graphs_are_replayed
from tests.kit.simulated_device import SimulatedDevice
from tests.runs import group, lines_of, local, spec_of
from tests.train.jobs import adamw, classifier, classify, cross_entropy

TREES = "torch._inductor.cudagraph_trees"


def test_begin_graph_iteration_without_graphs_imports_no_compiler(monkeypatch):
    monkeypatch.delitem(sys.modules, TREES, raising=False)
    begin_graph_iteration()
    assert not graphs_are_replayed() and TREES not in sys.modules


def test_each_micro_batch_begins_an_iteration(monkeypatch):
    begun, run = [], []
    trees = types.SimpleNamespace(mark_step_begin=lambda: begun.append(len(run)))
    monkeypatch.setitem(sys.modules, TREES, trees)

    def loss_fn(model, batch):
        run.append(batch)
        return cross_entropy(model, batch)

    local(spec_of(workers=1, virtual=2, steps=2), partial(classify, loss_fn=loss_fn))
    assert begun == list(range(len(run))) and len(run) >= 4


def test_loss_in_the_memory_of_a_graph_is_kept_until_the_host_reads_it(monkeypatch):
    """The loss is computed within the compiled code, so the next replay writes it again."""
    trees = types.SimpleNamespace(mark_step_begin=lambda: None)
    monkeypatch.setitem(sys.modules, TREES, trees)

    def train(ctx):
        sys.modules.setdefault(TREES, trees)
        model, last = classifier(), []

        def loss_fn(model, batch):
            for value in last:
                value.fill_(-1.0)
            loss, metric = cross_entropy(model, batch), torch.ones(()) * int(batch["i"][0])
            last[:] = loss.detach(), metric
            return loss, 1.0, {"first": metric}

        for step in ctx.steps(model, adamw(model), loss_fn):
            ctx.log({"loss": step.loss, **step.metrics})

    spec = spec_of(workers=1, virtual=3, steps=3)
    _, run = group(spec, train, device=SimulatedDevice())
    logged = [line for line in lines_of(run) if "loss" in line]
    assert [{k: v for k, v in x.items() if k != "time"} for x in logged] == local(
        spec, train
    ).logged

"""Replays of CUDA graphs: each micro-batch is an iteration of its own."""

import sys
import types

from elastic_dp.device.graph_replay import begin_graph_iteration, graphs_are_replayed
from tests.runs import local, spec_of
from tests.train.jobs import adamw, classifier, cross_entropy

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

    def train(ctx):
        model = classifier()
        for _ in ctx.steps(model, adamw(model), loss_fn):
            pass

    local(spec_of(workers=1, virtual=2, steps=2), train)
    assert begun == list(range(len(run))) and len(run) >= 4

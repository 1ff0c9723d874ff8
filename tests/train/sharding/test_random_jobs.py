"""Random jobs with a sharded optimizer, whose workers are threads of this process and add up their
gradients as in training: after losses, joins and aborts, weights and state are those of the plain
optimizer in one process, to the last bit. A seed draws everything."""

import random
from functools import partial

import pytest
import torch
from torch import optim
from torch.optim.lr_scheduler import OneCycleLR

from elastic_dp.distributed import abandoned_groups, gradient_buckets, process_group
from elastic_dp.distributed.gradient_exchange import GradientExchange
from elastic_dp.distributed.gradient_norm import GradientClipping
from elastic_dp.distributed.gradient_reducer import GradientReducer
from elastic_dp.extensions.sharding.piece_reduction import PieceReduction
from elastic_dp.train.master_weights import MasterWeights
from tests.distributed.test_gradient_reducer import leaves_of, of_each
from tests.train.exactness.test_clipped_steps import VIRTUAL, equal_shares
from tests.train.exactness.test_torch_optimizers import FUSED, VARIANTS
from tests.train.sharding import test_sharded_state as of_state
from tests.train.sharding.test_sharded_state import Member, catch_up, check_equal, enter

SINGLE, DOUBLE, HALF = torch.float32, torch.float64, torch.bfloat16
MATRICES = [(64, 3), (8, 8), (70, 33), (256, 5)]
SHAPES = [*MATRICES, *[()] * 3, (1,), (64,), (129,), (192,), (1024,), (2, 4, 8, 16), (0,), (3, 0)]
LIMITS = {  # in bytes, smaller and larger than what there is
    (of_state.gradient_units, "UNIT_BYTES"): (1024, 4096),
    (of_state.sharded_optimizer, "KEPT_BYTES"): (0, 4096, 1 << 20),
    (of_state.sharded_optimizer, "STEP_BYTES"): (1024, 1 << 20),
    (of_state.sharded_optimizer, "UPDATED_BYTES"): (2048, 1 << 20),
    (process_group, "_AT_ONCE_BYTES_ALONE"): (0, 1 << 20),
}
BUCKETS = "UNCUT_BYTES", "FIRST_BUCKET_BYTES", "BUCKET_BYTES", "LAST_BUCKET_BYTES"
LIMITS |= {(gradient_buckets, name): (256, 4096, 1 << 20) for name in BUCKETS}


class Job:
    """A model, an optimizer with its groups, and in which steps there are gradients."""

    def __init__(self, rng):
        self.kind, options = rng.choice([*of_state.kinds_and_options(), *of_state.of_others()])
        self.has_masters = self.kind in VARIANTS and rng.random() < 0.25
        ways = [{}, {"fused": True}] if self.kind in FUSED else [{}]
        if self.kind in VARIANTS and self.kind is not optim.Muon:
            ways += [{"foreach": True}, {"foreach": False}]
        self.options = {"lr": 0.01} | options | rng.choice(ways)
        dtypes, shapes = [[SINGLE], [DOUBLE, SINGLE], [HALF], [HALF, SINGLE]], SHAPES
        is_fused_sgd = self.kind is optim.SGD and "fused" in self.options
        by_lists = self.kind is optim.SGD and self.options.get("foreach") and "momentum" in options
        if self.has_masters:
            dtypes = dtypes[2:]
        elif is_fused_sgd or by_lists:  # are refused in bfloat16
            dtypes = dtypes[:2]
        if self.kind is optim.Muon:
            shapes = MATRICES
        elif self.kind is optim.Adafactor:
            shapes = [shape for shape in SHAPES if 0 not in shape]
            self.options["eps"] = 1e-6, 1e-3  # the default is refused where dtypes differ
        self.shapes = [(64, 3), *rng.choices(shapes, k=rng.randrange(1, 13))]
        self.dtypes = tuple(rng.choices(used := rng.choice(dtypes), k=len(self.shapes)))
        self.group_of = rng.choices(range(3), k=len(self.shapes))

        def some(share):
            return {n for n in range(len(self.shapes)) if rng.random() < share}

        self.transposed, self.left_out = some(0.3), some(0.08) - {0}
        self.rare, self.frozen = some(0.3), some(0.1)  # have no gradients in some steps
        if is_fused_sgd and "momentum" in options:  # is refused then
            self.rare = self.frozen = set()
        self.clip_norm = rng.choice([None, 0.5])
        by_value = self.clip_norm is None and len(self.shapes) % 2 > 0
        self.clipping = GradientClipping(self.clip_norm, 0.1 if by_value else None)
        self.wire = None if DOUBLE in used else rng.choice([None, None, "bf16", "int8"])

    def optimizer(self, parameters):
        groups = [{"params": [], "lr": 0.01 * (n + 1)} for n in range(3)]
        for n, p in enumerate(parameters):
            if n in self.transposed and p.ndim > 1:  # in memory
                p.data = p.data.transpose(0, 1).contiguous().transpose(0, 1)
            if n not in self.left_out:
                groups[self.group_of[n]]["params"].append(p)
        make = partial(MasterWeights, optimizer_class=self.kind) if self.has_masters else self.kind
        return make([group for group in groups if group["params"]], **self.options)


class Worker(Member):
    """A member that computes its gradients."""

    def __init__(self, job, shard=True):
        super().__init__(job.optimizer, job.shapes, job.dtypes, shard, job.clip_norm)
        self.job, parameters, clipping = job, self.parameters, job.clipping
        exchange = GradientExchange(parameters.values(), clipping=clipping)
        if self.sharding is not None:
            exchange = PieceReduction(self.sharding, parameters.values(), clipping=clipping)
        self.reducer = GradientReducer(parameters, job.wire, exchange=exchange)
        cycles = "betas" in self.optimizer.defaults
        self.scheduler = OneCycleLR(self.optimizer, 0.1, 200, cycle_momentum=cycles)

    def used(self, step, virtual_workers=range(VIRTUAL)):
        """Rare parameters have a gradient of one virtual worker, in half of the steps."""
        turns = {(5 * step + v) % (2 * VIRTUAL) for v in virtual_workers}
        rare = {n for n in self.job.rare if n not in turns}
        named = enumerate(self.parameters.values())
        return {p for n, p in named if p.requires_grad and n not in rare}

    def compute(self, share, step):
        self.reducer.begin(step)
        leaves = leaves_of(share, VIRTUAL)
        for leaf in leaves:
            is_last, used = leaf is leaves[-1], self.used(step, [leaf.virtual_worker])
            self.reducer.before_leaf(leaf, is_last)
            self.reducer.before_backward()
            draw = torch.Generator().manual_seed(VIRTUAL * step + leaf.virtual_worker)
            loss = torch.zeros((), dtype=DOUBLE, requires_grad=True)
            for p in self.parameters.values():
                factors = torch.randn(p.shape, generator=draw).to(p.dtype)
                loss = loss + (torch.sin(3 * p) * factors).sum().double() if p in used else loss
            loss.backward()
            self.reducer.after_leaf(leaf, is_last)
        self.reducer.send()
        self.reducer.exchange.reduce()

    def attempt(self, share, until="committed"):
        sharding, step = self.sharding, self.step + 1
        if sharding is not None:
            sharding.begin()
        self.compute(share, step)
        if until == "sent":
            return
        used, exchange = self.used(step), self.reducer.exchange
        if sharding is not None:
            sharding.take_copies()
        exchange.finish(1 / VIRTUAL, [p in used for p in self.reducer._layout.parameters])
        if sharding is None or sharding.all_hold_all:
            assert exchange.finite
            exchange.assign()
        else:
            sharding.prepare(step, exchange.gradients(), used, exchange.received_memory)
            if until == "prepared":
                return
            assert not sharding.gather(exchange.norm, compares=step % 2 == 0)
            exchange.agree_finite()
            assert exchange.finite
        if until != "committed":
            return
        if sharding is not None:
            sharding.step_ends([p.grad for p in self.parameters.values()])
            self.reducer.drop()
        self.optimizer.step()
        self.reducer.drop()
        self.scheduler.step()
        self.step = step
        for n in self.job.frozen:
            self.parameters[str(n)].requires_grad_((step + n) // 3 % 2 == 0)

    def train(self, group, shares, untils):
        """Steps of one generation, each of them up to this point."""
        self.reducer.open(group, shares, VIRTUAL, True)
        for until in untils:
            self.attempt(shares[group.rank], until)
        group.gather_bytes(b"")
        self.reducer.close()

    def take_over(self, source, *, joins):
        super().take_over(source, joins=joins)
        groups = zip(self.optimizer.param_groups, source.optimizer.param_groups, strict=True)
        for mine, given in groups:
            mine |= {key: value for key, value in given.items() if key != "params"}
        self.scheduler.load_state_dict(source.scheduler.state_dict())
        for name, p in self.parameters.items():
            p.requires_grad_(source.parameters[name].requires_grad)


def check(seed):
    rng, abandoned = random.Random(seed), []
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(abandoned_groups, "abandon", abandoned.append)
        for (module, name), values in LIMITS.items():
            patched.setattr(module, name, rng.choice(values))
        workers = [Worker(job := Job(rng))]
        for _ in range(rng.randrange(2, 6)):
            while len(workers) < 6 and rng.random() < (0.9 if len(workers) < 3 else 0.3):
                workers.append(Worker(job))
                workers[-1].take_over(workers[0], joins=True)
            shares, untils = equal_shares(len(workers)), ["committed"] * rng.randrange(3)
            ends = rng.choice([["sent"], ["prepared"], *[["gathered", "committed"]] * 2])
            last = {worker.sharding: rng.choice(ends) for worker in workers}

            def train(worker, shares=shares, untils=untils, last=last):
                sharding = worker.sharding
                worker.train(sharding._group, shares, [*untils, last[sharding]])

            enter(workers, train)
            lost = rng.choice(workers)
            left = [worker for worker in workers if worker is not lost]
            if left and rng.random() < 0.6:
                catch_up(left)
                if min(of_state.holders_of(left)):  # or else it would go back to a checkpoint
                    workers = left
            catch_up(workers)
        enter(workers)
        plain, steps = Worker(job, shard=False), ["committed"] * workers[0].step
        of_each(1, lambda group: plain.train(group, equal_shares(1), steps))
        check_equal(workers, plain)


# In these, parameters without dimensions were clipped otherwise than without sharding.
CLIPPED = 497, 606
FROZEN = 20104  # a step in which no parameter requires a gradient
MANY = pytest.param(range(1000, 1060), marks=pytest.mark.slow)


@pytest.mark.parametrize("seeds", [(*CLIPPED, FROZEN), MANY], ids=["few", "many"])
def test_sharded_job_has_the_bits_of_the_plain_optimizer(seeds):
    for seed in seeds:
        try:
            check(seed)
        except BaseException as error:
            error.add_note(f"The job's seed is {seed}.")
            raise

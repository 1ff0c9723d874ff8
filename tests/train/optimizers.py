"""Optimizers as people write them, with state in places that torch's own never use. Each depends on
all of its state."""

import itertools
import logging
import random
from collections import Counter, OrderedDict, defaultdict, deque

import numpy as np
import torch

LOG = logging.getLogger(__name__)


def pytorch_optimizer():
    """The package of LARS and LAMB. Each process of the tests imports all test modules, and this
    takes seconds: so it is imported where it is used."""
    import pytorch_optimizer

    return pytorch_optimizer


class History:
    """An object that carries itself."""

    def __init__(self):
        self.past = deque(maxlen=5)

    def state_dict(self):
        return {"past": self.past}

    def load_state_dict(self, state):
        self.past = state["past"]

    def clip(self, norm):
        self.past.append(norm)
        return float(np.percentile(self.past, 50)) / (norm + 1e-6)


class AutoClip(torch.optim.SGD):
    """Clips by the median of past norms; what it counts lies in containers of all kinds."""

    def __init__(self, parameters, **options):
        super().__init__(parameters, lr=0.05, momentum=0.9, **options)
        self.history, self.clipped = History(), Counter()
        self.clip = self.history.clip  # bound to an object
        self.phase, self.log, self.rule = "warm", LOG, lambda n: n + 1
        self.array, self.seen = np.zeros(3), set()
        self.table = OrderedDict(a=defaultdict(list))
        self.first = self.param_groups[0]["params"][0]

    @torch.no_grad()
    def step(self):
        grads = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = float(torch.stack([p.grad.norm() for p in grads]).norm())
        factor = self.clip(norm) * (1.0 + 0.01 * len(self.history.past))
        self.clipped["low" if factor < 1 else "high"] += 1
        self.array[self.clipped.total() % 3] += factor
        self.seen.add(self.clipped.total() % 4)
        self.table["a"][self.clipped.total() % 2].append(norm)
        factor += (
            0.01 * float(self.array.sum()) + 0.01 * len(self.seen) + 0.001 * len(self.table["a"][1])
        )
        if self.phase == "hot":
            factor *= 0.9
        self.phase = "hot" if self.clipped["low"] % 2 else "warm"
        for p in grads:
            slow = self.state[p].setdefault("slow", torch.zeros_like(p))
            slow.lerp_(p.grad, 0.1)
            p.grad.mul_(factor).add_(slow)
        super().step()
        self.first.mul_(0.999)


class Noisy(torch.optim.Adam):
    """Adds noise of generators of its own; one belongs to a group."""

    def __init__(self, parameters):
        super().__init__(parameters, lr=0.01)
        self.torch, self.numpy = torch.Generator().manual_seed(1), np.random.default_rng(2)
        self.python, self.old = random.Random(3), np.random.RandomState(4)
        self.param_groups[0]["philox"] = np.random.Generator(np.random.Philox(5))

    @torch.no_grad()
    def step(self):
        super().step()
        for p in self.param_groups[0]["params"]:
            noise = torch.randn(p.shape, generator=self.torch)
            noise += float(self.numpy.normal()) + self.python.gauss(0, 1)
            noise += float(self.old.normal())
            noise += float(self.param_groups[0]["philox"].normal())
            p.add_(1e-3 * noise)


class Flat(torch.optim.Optimizer):
    """All momenta are views of one vector, which is scaled as a whole."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.05})

    @torch.no_grad()
    def step(self):
        parameters = self.param_groups[0]["params"]
        if not self.state:
            self.vector = torch.zeros(sum(p.numel() for p in parameters))
            at = 0
            for p in parameters:
                view = self.vector[at : at + p.numel()].view_as(p)
                self.state[p] = {"momentum": view}
                at += p.numel()
        for p in parameters:
            if p.grad is not None:
                self.state[p]["momentum"].add_(p.grad)
        self.vector.mul_(0.9)
        for p in parameters:
            p.sub_(self.state[p]["momentum"], alpha=0.05)


class Preconditioned(torch.optim.Optimizer):
    """Has containers in the state of each parameter, and a table that all share."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.05})

    @torch.no_grad()
    def step(self):
        for p in self.param_groups[0]["params"]:
            if p.grad is None:
                continue
            state = self.state[p]
            if not state:
                state["kept"] = {"power": torch.ones(()), "terms": [torch.zeros_like(p)]}
                state["past"] = deque(maxlen=3)
                state["table"] = next(iter(self.state.values())).get("table", torch.ones(4))
            state["past"].append(float(p.grad.norm()))
            state["kept"]["power"] *= 0.99
            state["table"].mul_(0.999)
            state["kept"]["terms"][0].add_(p.grad.square())
            root = state["kept"]["terms"][0].sqrt() + max(state["past"])
            p.sub_(p.grad / root * state["kept"]["power"] * state["table"][0], alpha=0.05)


class Lookahead(torch.optim.Optimizer):
    """Around another optimizer, as the usual one: it does not call torch's constructor."""

    def __init__(self, inner, every=3):
        self.inner, self.every, self.calls = inner, every, 0
        self.param_groups, self.defaults = inner.param_groups, inner.defaults
        self.state = defaultdict(dict)
        self._optimizer_step_pre_hooks = OrderedDict()  # and none of its other hooks
        self._optimizer_step_post_hooks = OrderedDict()

    @torch.no_grad()
    def step(self):
        self.inner.step()
        self.calls += 1
        for group in self.param_groups:
            for p in group["params"]:
                slow = self.state[p].setdefault("slow", p.clone())
                if self.calls % self.every == 0:
                    slow.lerp_(p, 0.5)
                    p.copy_(slow)


class Both(torch.optim.Optimizer):
    """Momentum for matrices and AdamW for the rest, each an optimizer in a dict."""

    def __init__(self, model):
        matrices = [p for p in model.parameters() if p.ndim > 1]
        rest = [p for p in model.parameters() if p.ndim <= 1]
        super().__init__([{"params": matrices}, {"params": rest}], {"lr": 0.1})
        self.parts = {
            "matrices": torch.optim.SGD(matrices, lr=0.05, momentum=0.9),
            "rest": torch.optim.AdamW(rest, lr=0.01),
        }

    def step(self):
        for part in self.parts.values():
            part.step()
            for group in part.param_groups:
                group["lr"] *= 0.99


class Cycling(torch.optim.lr_scheduler.LRScheduler):
    """With a lambda, a queue and a generator of its own."""

    def __init__(self, optimizer):
        self.rule, self.past = lambda lr: lr * 0.999, deque([1.0], maxlen=4)
        self.random = np.random.default_rng(7)
        super().__init__(optimizer)

    def get_lr(self):
        self.past.append(float(self.random.uniform(0.9, 1.1)))
        mean = sum(self.past) / len(self.past)
        return [self.rule(lr) * mean for lr in self.base_lrs]


class ByIterator(torch.optim.SGD):
    def __init__(self, parameters):
        super().__init__(parameters, lr=0.05)
        self.rates = itertools.cycle([0.1, 0.2])


class LateInner(torch.optim.SGD):
    """Makes its inner optimizer in the first step."""

    def step(self):
        self.inner = torch.optim.Adam(self.param_groups[0]["params"])
        super().step()


class ByParameter(torch.optim.SGD):
    """Keeps state in a dict of its own, by parameter or by `id()`."""

    def __init__(self, parameters, key=lambda p: p):
        super().__init__(parameters, lr=0.05)
        self.key, self.counts = key, {}

    def step(self):
        for p in self.param_groups[0]["params"]:
            self.counts[self.key(p)] = self.counts.get(self.key(p), 0) + 1
        super().step()


class Settings:
    def __init__(self):
        self.rate = 0.1


class OfSettings(torch.optim.SGD):
    def __init__(self, parameters):
        super().__init__(parameters, lr=0.05)
        self.settings = Settings()


class LateIterator(torch.optim.SGD):
    def step(self):
        self.state[self.param_groups[0]["params"][0]]["rates"] = iter([1])
        super().step()


class OwnTensor(torch.optim.SGD):
    def __init__(self, parameters):
        super().__init__(parameters, lr=0.05)
        self.scale, self.decay = torch.ones(()), 1.0

    @torch.no_grad()
    def step(self):
        for p in self.param_groups[0]["params"]:
            p.grad.mul_(self.scale * self.decay)
        super().step()

"""Torch's communication hooks on the buckets of members that are threads of this process."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch

from elastic_dp.distributed import comm_hook, gradient_buckets
from elastic_dp.distributed.comm_hook import HookSettings
from elastic_dp.distributed.gradient_reducer import GradientReducer
from elastic_dp.distributed.process_group import ProcessGroup
from elastic_dp.errors import GroupAborted
from tests.distributed.test_gradient_reducer import _dropped_here, leaves_of, named, of_each

assert _dropped_here  # a fixture

RANK, ROWS, COLUMNS = 2, 12, 20
POWER_SGD = HookSettings(
    "powersgd",
    {
        "matrix_approximation_rank": RANK,
        "start_powerSGD_iter": 2,
        "orthogonalization_epsilon": 1e-8,
    },
)
HOOKS = {"bf16": HookSettings("bf16"), "fp16": HookSettings("fp16"), "powersgd": POWER_SGD}
of_each_hook = pytest.mark.parametrize("name", HOOKS)

Gradients = Sequence[torch.Tensor | None]


@pytest.fixture(autouse=True)
def _members_draw_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Q is drawn from torch's global generator, which these members share, unlike workers."""
    drawing, power_sgd = threading.Lock(), comm_hook._POWER_SGD

    def in_turn(state: Any, bucket: Any) -> Any:
        with drawing:
            return power_sgd(state, bucket)

    monkeypatch.setattr(comm_hook, "_POWER_SGD", in_turn)


def parameters_of(*shapes: Sequence[int]) -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(torch.zeros(tuple(shape))) for shape in shapes]


def drawn(step: int, rank: int, like: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The gradient of a member, of about the size of a mean."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    return [torch.randn(p.shape, generator=generator) for p in like]


class Member:
    """One member of a group that makes steps with a gradient that it is given."""

    def __init__(
        self, group: ProcessGroup, parameters: Sequence[torch.nn.Parameter], hook: Any
    ) -> None:
        self.group, self.parameters = group, parameters
        self.sums = GradientReducer(named(parameters), comm_hook=hook)
        self.open()
        self.sent = 0  # bytes of all-reduces
        all_reduce = group.all_reduce

        def counted(tensor: torch.Tensor) -> Any:
            self.sent += tensor.nbytes
            return all_reduce(tensor)

        group.all_reduce = counted  # type: ignore[method-assign]

    def open(self) -> None:
        """Opens a generation."""
        size = self.group.world_size
        self.shares = [[(rank, rank + 1)] for rank in range(size)]
        self.sums.open(self.group, self.shares, size, exact=False)

    def send(self, step: int, gradients: Gradients) -> None:
        """The step up to where all buckets are launched. The gradient is that of the mean of this
        member's rows, so its part of the sum is divided by the number of members."""
        self.sent = 0
        self.sums.begin(step, step=step)
        (leaf,) = leaves_of(self.shares[self.group.rank], self.group.world_size)
        self.sums.before_leaf(leaf, True)
        self.sums.before_backward()
        given = [(p, g) for p, g in zip(self.parameters, gradients, strict=True) if g is not None]
        loss = sum((p * g).sum() for p, g in given)
        (loss / self.group.world_size).backward()
        self.sums.after_leaf(leaf, True)
        self.sums.send()

    def step(self, step: int, gradients: Gradients | None = None) -> list[torch.Tensor]:
        """Returns the gradient of the step, by parameter."""
        self.send(
            step, drawn(step, self.group.rank, self.parameters) if gradients is None else gradients
        )
        self.sums.reduce()
        assert self.sums.complete(1.0)
        return [total.clone() for _, total in self.sums.totals()][::-1]

    @property
    def errors(self) -> Mapping[int, torch.Tensor]:
        power = self.sums._plan.hook._power  # type: ignore[union-attr]
        return dict(power.error_dict) if power is not None else {}


def of_all(world_size: int, act: Callable[[ProcessGroup], Any]) -> list[Any]:
    return of_each(world_size, act)


def equal(one: Sequence[torch.Tensor], other: Sequence[torch.Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(one, other, strict=True))


@pytest.mark.parametrize("world_size", [2, 3])
@of_each_hook
def test_all_members_get_the_same_bits_near_the_mean(name: str, world_size: int) -> None:
    """PowerSGD of matrices whose rank is not larger than what it approximates."""

    def of_rank(step: int, rank: int, shape: Sequence[int]) -> torch.Tensor:
        """All members' gradients have one column space, in which their sums are, too."""
        left = torch.randn(shape[0], RANK, generator=torch.Generator().manual_seed(step))
        generator = torch.Generator().manual_seed(100 * step + rank)
        return left @ torch.randn(RANK, shape[1], generator=generator)

    def run(group: ProcessGroup) -> list[list[torch.Tensor]]:
        parameters = parameters_of((ROWS, COLUMNS), (5,))
        member = Member(group, parameters, HOOKS[name])
        bias = [torch.full((5,), 1.0 + group.rank)]
        return [
            member.step(step, [of_rank(step, group.rank, (ROWS, COLUMNS)), *bias])
            for step in range(1, 6)
        ]

    found = of_all(world_size, run)
    tolerance = {"bf16": 2e-2, "fp16": 2e-3, "powersgd": 2e-3}[name]
    for step in range(1, 6):
        mean = sum(of_rank(step, r, (ROWS, COLUMNS)) for r in range(world_size)) / world_size
        weight, bias = found[0][step - 1]
        torch.testing.assert_close(weight, mean, rtol=tolerance, atol=tolerance)
        wanted = torch.full((5,), (1 + world_size) / 2)
        torch.testing.assert_close(bias, wanted, rtol=tolerance, atol=tolerance)
        assert all(equal(found[0][step - 1], other[step - 1]) for other in found)


def test_number_of_bytes_is_that_of_what_each_hook_sends() -> None:
    """Each step is one all-reduce of 16 bits an element, or with PowerSGD three, of what is not
    compressed, of P and of Q."""

    def bytes_of(hook: Any) -> list[int]:
        def run(group: ProcessGroup) -> list[int]:
            member = Member(group, parameters_of((ROWS, COLUMNS), (5,)), hook)
            sent = []
            for step in (2, 3):
                member.step(step)
                sent.append(member.sent)
            return sent

        first, *others = of_all(3, run)
        assert all(other == first for other in others)
        return list(first)

    whole = 4 * (ROWS * COLUMNS + 5)
    (padded, _) = bytes_of(None)
    assert whole <= padded < whole + 3 * 4
    assert bytes_of(HOOKS["bf16"]) == bytes_of(HOOKS["fp16"]) == [whole / 2] * 2
    assert bytes_of(POWER_SGD) == [whole, 4 * (RANK * (ROWS + COLUMNS) + 5)]


def test_powersgd_applies_later_what_it_loses_of_a_gradient() -> None:
    """What all steps have applied, and the mean of the errors, is the sum of all gradients."""

    def run(group: ProcessGroup) -> tuple[torch.Tensor, torch.Tensor]:
        member = Member(group, parameters_of((ROWS, COLUMNS)), POWER_SGD)
        applied = sum(member.step(step)[0] for step in range(1, 13))
        return torch.as_tensor(applied), member.errors[0].view(ROWS, COLUMNS)

    found, like = of_all(3, run), [torch.zeros(ROWS, COLUMNS)]
    total = sum(drawn(step, rank, like)[0] for step in range(1, 13) for rank in range(3)) / 3
    lost = sum(error for _, error in found) / 3
    assert float(lost.norm()) > 0.3 * float(total.norm())
    torch.testing.assert_close(found[0][0] + lost, total, rtol=1e-4, atol=1e-4)


def test_step_that_is_begun_again_finds_nothing_of_its_first_attempt() -> None:
    """Nor does a new generation: the gradient is that of a first step with PowerSGD."""

    def run(group: ProcessGroup) -> list[list[torch.Tensor]]:
        member = Member(group, parameters_of((ROWS, COLUMNS)), POWER_SGD)
        found = []
        for steps in ((4, 5, 6), (6,), (7,), (6,)):
            if steps == (7,):
                member.open()
            found.append([member.step(step) for step in steps][-1])
        member.open()
        return [*found, member.step(6), member.step(7)]

    warm, again, opened, _, cold, warm_again = of_all(2, run)[0]
    assert equal(again, cold) and not equal(warm, cold)
    assert not equal(opened, warm_again)


def test_members_draw_by_the_seed_of_the_step() -> None:
    """A Q that a generation begins with is another one in each step."""

    def run(group: ProcessGroup) -> list[torch.Tensor]:
        member = Member(group, parameters_of((ROWS, COLUMNS)), POWER_SGD)
        same = drawn(1, group.rank, member.parameters)
        found = []
        for step in (5, 6, 5):
            member.open()
            found += member.step(step, same)
        return found

    first, other, again = of_all(2, run)[0]
    assert torch.equal(first, again) and not torch.equal(first, other)


@of_each_hook
def test_parameters_of_any_shape_and_buckets_that_change_are_reduced(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A scalar, an empty one, one in channels_last; a gradient of zeros, an absent one; and one
    parameter that needs no gradient from some step on."""
    for limit in ("UNCUT", "FIRST_BUCKET", "LAST_BUCKET", "BUCKET"):
        monkeypatch.setattr(gradient_buckets, f"{limit}_BYTES", 256)

    def run(group: ProcessGroup) -> list[list[torch.Tensor]]:
        last = torch.nn.Parameter(torch.zeros(16, 8, 3, 3).to(memory_format=torch.channels_last))
        parameters = [*parameters_of((), (0, 3), (ROWS, COLUMNS), (30, 30), (9, 7)), last]
        member = Member(group, parameters, HOOKS[name])
        given: list[torch.Tensor | None] = [*drawn(1, 0, parameters)]
        given[3], given[4] = torch.zeros(30, 30), None
        found = [member.step(step, given) for step in (1, 2, 3, 4)]
        assert len(member.sums._exchanges) >= 3
        parameters[2].requires_grad_(False)
        rest = [*given[:2], None, *given[3:]]
        found += [member.step(step, rest) for step in (5, 6)]
        assert len(found[-1]) == 5
        wanted = [given[0], given[1], given[3], torch.zeros(9, 7), given[5]]
        if name != "powersgd":
            for mine, right in zip(found[-1], wanted, strict=True):
                torch.testing.assert_close(mine, right, rtol=1e-2, atol=1e-2)
        assert found[-1][2].count_nonzero() == found[-1][3].count_nonzero() == 0
        return found

    first, second = of_all(2, run)
    assert all(equal(one, other) for one, other in zip(first, second, strict=True))


@pytest.mark.parametrize("lost_after", [1, 2], ids=["first all-reduce", "second all-reduce"])
def test_member_that_waits_within_a_hook_is_freed_by_an_abort(lost_after: int) -> None:
    """PowerSGD launches further all-reduces when the one before has arrived."""
    sent, freed = threading.Barrier(2), threading.Event()

    def run(group: ProcessGroup) -> object:
        member = Member(group, parameters_of((ROWS, COLUMNS), (5,)), POWER_SGD)
        launched, all_reduce = 0, group.all_reduce
        if group.rank == 1:  # it is gone before its next all-reduce

            def lost(tensor: torch.Tensor) -> Any:
                nonlocal launched
                launched += 1
                if launched > lost_after:
                    sent.wait()
                    freed.wait()
                    raise GroupAborted("this member is gone")
                return all_reduce(tensor)

            group.all_reduce = lost  # type: ignore[method-assign]
        else:
            threading.Thread(target=lambda: (sent.wait(), group.abort())).start()
        with pytest.raises(GroupAborted):
            member.step(3)
        member.sums.close()
        # The last one that is closed goes first: the one with nothing in flight, which ends the
        # operation of the other one.
        group.close()
        freed.set()
        return None

    of_all(2, run)


def test_lone_member_compresses_nothing() -> None:
    def run(group: ProcessGroup) -> list[torch.Tensor]:
        member = Member(group, parameters_of((ROWS, COLUMNS)), POWER_SGD)
        return [x for step in (1, 2, 3) for x in member.step(step)]

    (found,) = of_all(1, run)
    like = [torch.zeros(ROWS, COLUMNS)]
    assert equal(found, [x for step in (1, 2, 3) for x in drawn(step, 0, like)])

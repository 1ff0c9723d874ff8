"""Which of torch's hooks for DDP reduces gradients in fast mode."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from elastic_dp.config.field_checks import at_least, boolean, none_only_by_default, whole_number
from elastic_dp.errors import SpecError


@dataclass(frozen=True, kw_only=True)
class PowerSGDConfig:
    """The arguments of torch's `PowerSGDState` (Vogels et al. 2019, arXiv:1905.13727), for
    `ElasticTrainer(comm_hook=…, exact=False)`. The defaults are those of torch, except that of
    `orthogonalization_epsilon`.

    - `matrix_approximation_rank`: the rank of the approximation. A gradient of shape (n, …) that is
      large enough is taken as a matrix of n rows, and sent as two matrices with this many columns.
    - `start_powerSGD_iter`: how many steps at the start of the run are not compressed.
    - `min_compression_rate`: a gradient is compressed if that divides its size by more than this.
    - `use_error_feedback`: each worker adds to its gradient what compression lost of the last one.
    - `warm_start`: a step starts from the column space that the step before it found.
    - `orthogonalization_epsilon`: added to norms before dividing by them. With 0, the default of
      torch, a gradient of zeros becomes not finite, which fails the run.
    - `batch_tensors_with_same_shape`: compress gradients of the same shape together.
    """

    matrix_approximation_rank: int = 1
    start_powerSGD_iter: int = 1000
    min_compression_rate: float = 2
    use_error_feedback: bool = True
    warm_start: bool = True
    orthogonalization_epsilon: float = 1e-8
    batch_tensors_with_same_shape: bool = False

    def __post_init__(self) -> None:
        none_only_by_default("PowerSGDConfig", self)
        whole_number("PowerSGDConfig.matrix_approximation_rank", self.matrix_approximation_rank, 1)
        whole_number("PowerSGDConfig.start_powerSGD_iter", self.start_powerSGD_iter, 0)
        at_least("PowerSGDConfig.min_compression_rate", self.min_compression_rate, 0.0)
        at_least("PowerSGDConfig.orthogonalization_epsilon", self.orthogonalization_epsilon, 0.0)
        for name in ("use_error_feedback", "warm_start", "batch_tensors_with_same_shape"):
            boolean(f"PowerSGDConfig.{name}", getattr(self, name))
        if (self.use_error_feedback or self.warm_start) and self.start_powerSGD_iter < 2:
            raise SpecError(
                f"PowerSGDConfig.start_powerSGD_iter is {self.start_powerSGD_iter}, must be at "
                "least 2, as torch demands, unless use_error_feedback and warm_start are False"
            )


CommHookConfig = Literal["bf16", "fp16", "powersgd"] | PowerSGDConfig


def check_comm_hook(comm_hook: CommHookConfig | None, *, exact: bool) -> None:
    """Checks a job's fields. Raises SpecError."""
    names = (None, "bf16", "fp16", "powersgd")
    if not isinstance(comm_hook, PowerSGDConfig) and comm_hook not in names:
        raise SpecError(
            f"comm_hook is {comm_hook!r}, must be a PowerSGDConfig or one of "
            f"{', '.join(map(repr, names))}"
        )
    if comm_hook is not None and exact:
        raise SpecError(
            f"comm_hook is {comm_hook!r} and exact is True: torch's hooks compress the sum of each "
            "worker, so the result depends on the number of workers. Use exact=False with it, or "
            "wire= instead of it, which compresses gradients of exact runs"
        )

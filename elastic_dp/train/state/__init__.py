"""A worker's training state. `StepRecord` is found here under the name that checkpoints give it."""

from elastic_dp.train.state.step_record import StepRecord

__all__ = ["StepRecord"]

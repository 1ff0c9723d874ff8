"""A worker's training state. Checkpoints name `StepRecord` as a member of this package."""

from elastic_dp.train.state.step_record import StepRecord

__all__ = ["StepRecord"]

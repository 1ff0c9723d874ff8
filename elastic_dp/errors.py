"""Every error this package raises, sorted by who must act.

    ElasticError
    ├── SpecError          the user edits the job: a field is wrong; raised before anything starts
    │   ├── DataError      the data set cannot be used as asked (no shards, too few rows, a missing column)
    │   └── RunMismatch    the run at this path was started with another job; says what differs
    ├── TrainError         the user's training code must change
    │   ├── UserCodeError  an exception in it; carries the worker's own traceback
    │   ├── LoopError      ctx.steps was not called, or was left early, or the body wrote what it must not
    │   ├── LossError      the loss is not a scalar tensor, or is not finite
    │   └── ModelError     the model cannot be trained this way (SyncBatchNorm, sparse gradients, layouts differ)
    ├── ClusterError       the operator acts: capacity, lost controller, exhausted budget
    └── GroupError         nobody acts: a collective failed or was aborted; the group re-forms by itself

All of them pickle: `args` holds the facts, in the order the constructor takes them.
"""


class ElasticError(Exception):
    """Base of every error of this package."""


class SpecError(ElasticError):
    """A field of the job is wrong. Example: `min_workers=4` with `max_workers=2`.

    The message starts with the field's name and says what would be right.
    """


class DataError(SpecError):
    """The data set cannot be used as asked. Example: a folder without a single Parquet file."""


class RunMismatch(SpecError):
    """The run at (storage_path, name) was started by a different job.

    Example: the same name, but 16 virtual workers instead of 8. Use a new name, or the old value.
    """


class TrainError(ElasticError):
    """The user's training code must change."""


class UserCodeError(TrainError):
    """User code raised in a worker. Example: a KeyError in the loss function.

    `worker` is who raised, `description` the exception in one line, `remote_traceback` its traceback there.
    """

    def __init__(self, worker: str, description: str, remote_traceback: str) -> None:
        super().__init__(worker, description, remote_traceback)
        self.worker, self.description, self.remote_traceback = worker, description, remote_traceback

    def __str__(self) -> str:
        return f"{self.description} (in worker {self.worker})\n\n{self.remote_traceback}"


class LoopError(TrainError):
    """The loop over `ctx.steps` is not as it must be. Example: a lone `break` in its body."""


class LossError(TrainError):
    """The loss cannot be used. Example: it is NaN; the message names step, virtual worker and rows."""


class ModelError(TrainError):
    """The model cannot be trained this way. Example: it holds a SyncBatchNorm."""


class ClusterError(ElasticError):
    """The cluster cannot do what the run needs. Example: workers die again and again before one step."""


class GroupError(ElasticError):
    """A collective of one generation failed or was aborted. Never reaches user code."""


class GroupAborted(GroupError):
    """The generation was ended while this worker was inside it."""


class CollectiveFailed(GroupError):
    """A peer was lost inside a collective. Example: "Connection closed by peer"."""


class FormingFailed(GroupError):
    """The process group of a generation could not be formed within its deadline."""

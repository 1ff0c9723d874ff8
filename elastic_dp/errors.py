"""All errors of this package, sorted by who must act.

    ElasticError
    ├── SpecError          the user edits the job: a field is wrong; raised before anything starts
    │   ├── DataError      the data set cannot be used as asked (no shards, a missing column)
    │   │   └── BadShard   a row group cannot be decoded; names the shard and the row group
    │   ├── RunMismatch    the run at this path was started with another job; names the difference
    │   └── CheckpointError    no such checkpoint, or one that this version cannot read
    ├── TrainError         the user changes the training code
    │   ├── UserCodeError  an exception in it; carries the worker's traceback
    │   ├── LoopError      ctx.steps not called, or left early, or its body wrote training state
    │   ├── LossError      the loss is no scalar, not finite, or not made of weights and rows alone
    │   ├── ModelError     the model cannot be trained this way (SyncBatchNorm, sparse gradients, …)
    │   ├── RewindRequested    the run is to go on from an earlier step; `fit` does that
    │   ├── StateError     a value of the state cannot be stored; names its key
    │   └── StateDiffers   members hold different states; names the keys and the members
    ├── ClusterError       the operator acts: capacity, a lost controller, an exhausted budget
    │   └── LeaseLost      another cluster has taken over the run; this one must stop
    ├── StorageError       the operator acts: the store refuses or is away; carries its message
    │   ├── FileDamaged        a file of the run's folder is damaged; says what to do
    │   └── CheckpointDamaged  bytes differ from those committed; the previous checkpoint is used
    └── GroupError         nobody acts: a collective failed or was aborted; the group forms again

`Interrupted` is not an error but a KeyboardInterrupt.

All of them can be pickled: `args` holds the facts, in the order of the constructor's arguments.
"""


class ElasticError(Exception):
    """Base of every error of this package."""


class SpecError(ElasticError):
    """A field of the job is wrong. Example: `min_workers=4` with `max_workers=2`.

    The message starts with the field's name and says what would be right.
    """


class DataError(SpecError):
    """The data set cannot be used as asked. Example: a folder without a single Parquet file."""


class BadShard(DataError):
    """A row group cannot be decoded. Example: a shard that was cut off while it was written.

    `shard` is its name relative to the URL, `row_group` its number in the shard, and `reason` the
    decoder's message.
    """

    def __init__(self, shard: str, row_group: int, reason: str) -> None:
        super().__init__(shard, row_group, reason)
        self.shard, self.row_group, self.reason = shard, row_group, reason

    def __str__(self) -> str:
        return (
            f"row group {self.row_group} of {self.shard} cannot be decoded: {self.reason}; "
            "repair or remove the shard, or set DataConfig.max_bad_fraction"
        )


class RunMismatch(SpecError):
    """The run at (storage_path, name) was started by a different job.

    Example: the same name, but 16 virtual workers instead of 8. Use a new name, or the old value.
    """


class CheckpointError(SpecError):
    """A checkpoint cannot be used as asked. Example: `step=700` where only 500 and 1000 are
    committed."""


class TrainError(ElasticError):
    """The user's training code must change."""


class UserCodeError(TrainError):
    """User code raised in a worker. Example: a KeyError in the loss function.

    `worker` is the id of the worker, `description` the exception in one line, `remote_traceback`
    its traceback in the worker.
    """

    def __init__(self, worker: str, description: str, remote_traceback: str) -> None:
        super().__init__(worker, description, remote_traceback)
        self.worker, self.description, self.remote_traceback = worker, description, remote_traceback

    def __str__(self) -> str:
        return f"{self.description} (in worker {self.worker})\n\n{self.remote_traceback}"


class LoopError(TrainError):
    """The loop over `ctx.steps` is used in a way that is not supported. Example: a `break` in its
    body.
    """


class LossError(TrainError):
    """The loss cannot be used. Example: it is NaN; the message names step, virtual worker and
    rows."""


class ModelError(TrainError):
    """The model cannot be trained this way. Example: it holds a SyncBatchNorm."""


class RewindRequested(TrainError):
    """The run is to go on from an earlier step, without the rows of some steps. `fit` rewinds it
    and goes on; where there is no `fit`, `elastic-dp rewind` does that.

    After step `step`, for the reason `why`: to the newest checkpoint of `to_step` or earlier,
    without the rows of steps `first` to `last`.
    """

    def __init__(self, step: int, why: str, to_step: int, first: int, last: int) -> None:
        super().__init__(step, why, to_step, first, last)
        self.step, self.why, self.to_step, self.first, self.last = step, why, to_step, first, last

    def __str__(self) -> str:
        return (
            f"step {self.step}: {self.why}; the run is to go on from step {self.to_step}, without "
            f"the rows of steps {self.first} to {self.last}"
        )


class StateError(TrainError):
    """A value of the training state cannot be stored. Example: a lambda in the `state_dict` of
    `state["ema"]`.

    `path` is its key, `reason` what it is and what to do about it.
    """

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(path, reason)
        self.path, self.reason = path, reason

    def __str__(self) -> str:
        return f"the state cannot be stored: {self.path} is {self.reason}"


class StateDiffers(TrainError):
    """Members hold different states after a step. Example: `state["tracker"]` has the time in it.

    `names` are what differs, `members` those whose state is not in the checkpoint.
    """

    def __init__(self, step: int, names: str, members: str) -> None:
        super().__init__(step, names, members)
        self.step, self.names, self.members = step, names, members

    def __str__(self) -> str:
        return (
            f"the state differs between members after step {self.step}: {self.names} (on "
            f"{self.members}). What is passed as state=, and what the loop body changes, must "
            "follow from the steps alone: no clocks, no ranks, no random numbers of its own, "
            "nothing that the loss writes. Leave it out of state_dict(). The checkpoint of step "
            f"{self.step} has the weights, and the state of the other members"
        )


class ClusterError(ElasticError):
    """The cluster cannot do what the run needs. Example: workers die repeatedly within one step."""


class LeaseLost(ClusterError):
    """Another cluster holds the run. Example: this cluster was frozen for longer than its lease."""


class StorageError(ElasticError):
    """The store refuses, or was unavailable for too long. Example: "403 AccessDenied" for a
    bucket.
    """


class FileDamaged(StorageError):
    """A file of a run's folder is damaged. Example: a `result.json` that is empty after a crash.

    `path` is the file, `reason` what is wrong with it, `way_out` what to do about it.
    """

    def __init__(self, path: str, reason: str, way_out: str) -> None:
        super().__init__(path, reason, way_out)
        self.path, self.reason, self.way_out = path, reason, way_out

    def __str__(self) -> str:
        return f"{self.path} is damaged: {self.reason}. {self.way_out}"


class CheckpointDamaged(StorageError):
    """Bytes of a committed checkpoint are missing or differ from those committed. Example: a
    truncated part.

    `step` is the checkpoint's, `reason` names the object and what is wrong with it.
    """

    def __init__(self, step: int, reason: str) -> None:
        super().__init__(step, reason)
        self.step, self.reason = step, reason

    def __str__(self) -> str:
        return f"the checkpoint of step {self.step} is damaged: {self.reason}"


class GroupError(ElasticError):
    """A collective of one generation failed or was aborted. Never reaches user code."""


class GroupAborted(GroupError):
    """The generation was ended while this worker was inside it."""


class CollectiveFailed(GroupError):
    """A peer was lost inside a collective. Example: "Connection closed by peer"."""


class FormingFailed(GroupError):
    """The process group of a generation could not be formed within its deadline."""


class MembersMissing(FormingFailed):
    """Some members of a generation did not register in time to form its process group."""


class PiecesLost(GroupError):
    """Both holders of a piece of the optimizer's sharded state were lost: the run goes on from a
    checkpoint."""


class Interrupted(SystemExit, KeyboardInterrupt):
    """Ctrl-C or SIGTERM ended `fit()`, which has reported what was saved. Example: `kill` of a run
    on a laptop.

    Scripts catch it as a KeyboardInterrupt. If it is not caught, it ends the process with its
    `code`, 128 + the number of the signal, and without a traceback, because nothing is wrong.
    """

"""Names that earlier versions, Ray Train or torch's DataLoader have, and what to write instead."""

import functools
from typing import Any, TypeVar

from elastic_dp.errors import SpecError

C = TypeVar("C", bound=type)
_WIRE = 'use wire="bf16" or wire="int8", whose runs are exact'
_SHARD = (
    "does not exist any more: leave it out, and shard the model over the processes of a worker "
    "with fully_shard(model, mesh=ctx.mesh)"
)
REMOVED_NAMES = {
    "warm_processes": (
        "ScalingConfig.warm_processes does not exist any more: standby=1 keeps a worker ready that "
        "replaces a lost one at once"
    ),
    "comm_hook": f"comm_hook= does not exist any more: {_WIRE}",
    "PowerSGDConfig": f"PowerSGDConfig does not exist any more, nor does comm_hook=: {_WIRE}",
    "lease_s": "FailureConfig.lease_s does not exist any more: it is 2 × heartbeat_timeout_s",
    "heartbeat_interval_s": (
        "FailureConfig.heartbeat_interval_s does not exist any more: it is 0.25 s, or an eighth of "
        "heartbeat_timeout_s if that is less"
    ),
    "max_out_of_memory": (
        "FailureConfig.max_out_of_memory does not exist any more: it is 5 workers in a row; lower "
        "micro_batch_size, or request more memory with resources_per_worker"
    ),
    "max_losses_of_micro_batch": (
        "FailureConfig.max_losses_of_micro_batch does not exist any more: it is 5"
    ),
    "min_on_demand": (
        'ScalingConfig.min_on_demand does not exist any more: market="spot-first" takes on-demand '
        "nodes where no spot node is available"
    ),
    "zones": (
        "ScalingConfig.zones does not exist any more: write "
        'label_selector={"ray.io/availability-zone": "in(a,b)"}'
    ),
    "IterableData": (
        "IterableData does not exist any more: write the rows as shards once, by "
        'elastic_dp.dataprep.write_shards, and pass DataConfig("shards", …); rows that have an '
        "index need no shards: pass MapStyleData"
    ),
    "batch_lr": (
        "batch_lr does not exist any more: write the factor for LambdaLR as a function of the "
        "number of steps, by the sizes in ctx.virtual_workers"
    ),
    "labels": "labels= does not exist any more: put them into config=, or into the run's name",
    "release_timeout_s": (
        "FailureConfig.release_timeout_s does not exist any more: it is 2 × heartbeat_timeout_s"
    ),
    "every": 'CheckpointConfig.every does not exist any more: write every_s="auto"',
    "tensor_parallel_size": f"ScalingConfig.tensor_parallel_size {_SHARD}",
    "context_parallel_size": f"ScalingConfig.context_parallel_size {_SHARD}",
}


_OF_RAY_TRAIN = {
    ("ScalingConfig", "num_workers"): "ScalingConfig.num_workers does not exist: write "
    "max_workers=, and min_workers= for the fewest that train",
    ("ScalingConfig", "use_gpu"): "ScalingConfig.use_gpu does not exist: write "
    'resources_per_worker={"GPU": 1}',
    ("FailureConfig", "max_failures"): "FailureConfig.max_failures does not exist: write "
    "max_user_errors=, of exceptions, and max_losses_without_progress=, of lost workers",
    ("CheckpointConfig", "checkpoint_frequency"): "CheckpointConfig.checkpoint_frequency does not "
    "exist: write every_steps=",
    ("CheckpointConfig", "checkpoint_at_end"): "CheckpointConfig.checkpoint_at_end does not "
    "exist: the last step always has a checkpoint. Leave it out",
}


def refuses_removed_names(config: C) -> C:
    """Let a class of settings refuse what it had once by a SpecError, and not by a TypeError."""
    init: Any = config.__init__  # type: ignore[misc]

    @functools.wraps(init)
    def check(self: Any, *args: Any, **fields: Any) -> None:
        for name in fields:
            instead = _OF_RAY_TRAIN.get((config.__name__, name)) or REMOVED_NAMES.get(name)
            if instead is not None:
                raise SpecError(instead)
        init(self, *args, **fields)

    config.__init__ = check  # type: ignore[misc]
    return config


# Of data sets, and of torch's DataLoader
REMOVED_NAMES |= {
    "group_by_length": "group_by_length= does not exist any more: pack=N gives rows of one length "
    "without padding",
    "source_options": "source_options= does not exist any more: write each source with the columns "
    "and values that it shall have (`elastic_dp.dataprep.write_shards`), or change its rows in "
    "transform= by a column that says from which source they are",
    "source_column": "source_column= does not exist any more: write the number of the source into "
    "its shards, once: elastic-dp data convert SRC DST --query 'SELECT *, 3 AS source FROM rows'",
    "format": "format= does not exist any more: shards are known by their endings, or else by "
    "their first bytes",
    "csv_options": "csv_options= does not exist any more: training does not read CSV in place; "
    "write shards of it, once, by elastic_dp.dataprep.write_shards",
    "on_bad_shard": "on_bad_shard= does not exist any more: leave it out for a run that fails at "
    "rows that cannot be decoded, or write max_bad_fraction=0.01, which skips up to this fraction",
    "fill_nulls": "fill_nulls= does not exist any more: leave rows with nulls out by "
    "filter=pyarrow.compute.field('x').is_valid(), or write values into the shards, once: "
    "elastic-dp data convert SRC DST --query 'SELECT * REPLACE (coalesce(x, 0) AS x) FROM rows'",
    "sampler": "sampler= does not exist: the order of rows is arithmetic, and each row comes once "
    "an epoch. Leave it out. To weight rows, return (loss, weight) from the loss function; to "
    "choose or repeat them, pass torch.utils.data.Subset(dataset, indices)",
    "batch_size": "batch_size= does not exist: write micro_batch_size=, the rows of one virtual "
    "worker; the global batch is virtual_workers × micro_batch_size rows",
    "num_workers": "num_workers= does not exist: write workers=",
    "drop_last": 'drop_last= does not exist: write tail="drop" or tail="short"',
}
REMOVED_AUDIO = (
    'decode={...: "audio"} does not exist any more: decode the bytes in transform=, for '
    "example by torchcodec.decoders.AudioDecoder(content).get_all_samples()"
)

# Kinds of files that training does not read in place: what they are, and what to write instead
_LOAD = (
    'MapStyleData(datasets.load_dataset("{kind}", data_files={{url!r}}, split="train"), '
    "micro_batch_size=…), or shards of them, once: `elastic-dp data convert {{url}} DESTINATION`"
)
_CONVERT = "shards of them, once: `elastic-dp data convert {url} DESTINATION`"
_JSON = ("JSON", _LOAD.format(kind="json"))
_CSV = (
    "CSV",
    'MapStyleData(datasets.load_dataset("csv", data_files={url!r}, split="train"), '
    "micro_batch_size=…), or shards of them, once: "
    "write_shards(duckdb.sql(\"FROM read_csv('{url}', columns={{'id': 'BIGINT', …}})\"), 'shards')",
)
_AUDIO = (
    "audio",
    "their bytes to shards by `elastic_dp.dataprep.write_shards`, and decode them in transform=",
)
REMOVED_FORMATS = {
    **dict.fromkeys((".jsonl", ".ndjson", ".json", ".jsonl.gz", ".jsonl.zst", ".json.gz"), _JSON),
    **dict.fromkeys((".csv", ".tsv", ".csv.gz", ".csv.zst"), _CSV),
    ".txt": ("text", _LOAD.format(kind="text")),
    **dict.fromkeys(
        (".mds", ".mds.zstd", ".mds.zst", ".mds.gz"),
        (
            "MDS shards",
            "MapStyleData(streaming.StreamingDataset(local={url!r}), micro_batch_size=…)",
        ),
    ),
    ".bin": (
        "chunks of litdata, or of another program",
        "MapStyleData(litdata.StreamingDataset({url!r}), micro_batch_size=…)",
    ),
    **dict.fromkeys((".jpg", ".jpeg", ".png", ".webp"), ("images", _CONVERT)),
    **dict.fromkeys((".wav", ".flac", ".mp3", ".ogg", ".opus"), _AUDIO),
    **dict.fromkeys(
        (".tar.gz", ".tgz", ".tar.zst", ".tar.bz2", ".tar.lz4"),
        ("compressed tar", "them without compression, once, such as by gunzip"),
    ),
    ".orc": ("ORC", 'write_shards(pyarrow.orc.ORCFile(path).read(), "rows/") for each of them'),
}

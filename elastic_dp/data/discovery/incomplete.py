"""The marks of a data set that is still being written, or whose writer was killed: the object of
`convert`, and the folders of Spark and Hadoop."""

from collections.abc import Iterable

from elastic_dp.storage import redact_url

INCOMPLETE = "_incomplete"  # name of the object, present while an object store is written to

# Spark and Hadoop remove them when a job has finished; with some committers, finished tasks have
# their files in place before.
_UNFINISHED = ("_temporary", "__magic")


def unfinished_job(paths: Iterable[str]) -> str:
    """A warning if one of these paths, which are relative to the folder of a data set, is or lies
    in a folder of a job of Spark that has not finished; "" otherwise."""
    for path in paths:
        for part in path.split("/"):
            if part in _UNFINISHED:
                return (
                    f"'{path[: path.index(part)]}{part}/' is there: the Spark or Hadoop job that "
                    "writes this folder has not finished, or failed, so rows may be missing. Wait "
                    "until it ends; if it failed, write the folder again"
                )
    return ""


def incomplete_message(url: str) -> str:
    return (
        f"{redact_url(url)!r} is a data set that is not complete: it holds {INCOMPLETE!r}. Its "
        "conversion is still running, or was killed. Wait until it ends; if it was killed, remove "
        "the folder and convert again"
    )

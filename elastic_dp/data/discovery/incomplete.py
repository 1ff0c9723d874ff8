"""The marker object of a data set that is still being written, or whose conversion was killed."""

from elastic_dp.storage import redact_url

INCOMPLETE = "_incomplete"  # name of the object, present while an object store is written to


def incomplete_message(url: str) -> str:
    return (
        f"{redact_url(url)!r} is a data set that is not complete: it holds {INCOMPLETE!r}. Its "
        "conversion is still running, or was killed. Wait until it ends; if it was killed, remove "
        "the folder and convert again"
    )

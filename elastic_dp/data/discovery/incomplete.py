"""The mark of a data set that is still being written, or whose conversion was killed."""

from elastic_dp.storage import redact_url

INCOMPLETE = "_incomplete"  # lies in a data set while it is being written to an object store


def incomplete_message(url: str) -> str:
    return (
        f"{redact_url(url)!r} is a data set that is not whole: it holds {INCOMPLETE!r}, so "
        "its conversion is still "
        "running, which can be waited for, or was killed; then remove the folder and convert again"
    )

"""Counts in sentences: "1 worker", "2 workers"."""


def counted(number: int, one: str, many: str = "") -> str:
    """`many` is `one` with an s where it is not given: `counted(2, "worker joins", "workers
    join")`."""
    return f"{number} {one if number == 1 else many or f'{one}s'}"

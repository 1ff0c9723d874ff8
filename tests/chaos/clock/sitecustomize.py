"""A wall clock that can be set, for all Python processes of one host, and Ray and torch without
what they do not need: Python imports this by its name, from PYTHONPATH.

`CHAOS_CLOCK` names a file of eight bytes: by how many seconds `time.time` is wrong, at any moment.
Processes of one machine share its clock, so it is what Python takes for it; clocks that nobody can
set stay as they are.
"""

import mmap
import os
import struct
import time

import tests.ray.minimal.sitecustomize  # noqa: F401


def _follow(path: str) -> None:
    with open(path, "rb") as file:
        wrong_by = mmap.mmap(file.fileno(), 8, access=mmap.ACCESS_READ)
    real, number = time.time, struct.Struct("<d")
    time.time = lambda: real() + number.unpack_from(wrong_by)[0]


if "CHAOS_CLOCK" in os.environ:
    _follow(os.environ["CHAOS_CLOCK"])

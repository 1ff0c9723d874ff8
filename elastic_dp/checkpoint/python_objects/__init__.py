"""Attributes of the user's own objects (an optimizer's, a scheduler's) as a tree of values, and
back into objects.

The one who takes a state has built the same objects with the same code. So what cannot be written
down but need not be either stays what it is there: a function, a logger, a parameter. Everything
else is carried, or refused by its name:

    values        numbers, texts, bytes, tensors, NumPy arrays: as they are; containers of them:
                  copied
    generators    `torch.Generator`, NumPy's and Python's: their state, put into the generator that
                  is there
    objects       those with `state_dict` and `load_state_dict`: by these; other plain ones:
                  attribute by attribute
    closures      what a function's closure holds of the above: put into its cells
    references    parameters, modules, the optimizer's groups and the like: by name
    constants     functions, classes, modules, loggers, locks, …: not carried; one that is replaced
                  later is refused
    refused       iterators, and whatever else is made of neither attributes nor values

Where a value is no number, text, tensor, array, list, tuple, or dict with names for keys, a dict
with the key "elastic_dp" stands for it. An object that is found twice is carried once. Nothing is
pickled.
"""

from __future__ import annotations

from elastic_dp.checkpoint.python_objects.capture import Capture, held_in
from elastic_dp.checkpoint.python_objects.object_kinds import MARK, MISSING, References
from elastic_dp.checkpoint.python_objects.restore import Plain, Restore

__all__ = ["MARK", "MISSING", "Capture", "Plain", "References", "Restore", "held_in"]

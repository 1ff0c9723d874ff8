"""Captures the attributes of the user's own objects as a tree of values, and restores them.

The objects are those that an optimizer or a scheduler holds. The receiver of a state has built the
same objects with the same code. Values that cannot be stored and need not be, such as a function, a
logger or a parameter, stay as they are there. Everything else is captured or refused by name:

    values        numbers, texts, bytes, tensors, NumPy arrays: as they are; containers of them:
                  copied
    generators    `torch.Generator`, NumPy's and Python's: their state, set on the receiver's
                  generator
    objects       those with `state_dict` and `load_state_dict`: by these; other plain ones:
                  attribute by attribute
    closures      the values above in the cells of a function's closure
    references    parameters, modules, the optimizer's groups and the like: by name
    constants     functions, classes, modules, loggers, locks, …: not captured; replacing one later
                  is refused
    refused       iterators, and whatever else consists neither of attributes nor of values

A dict with the key "elastic_dp" (a mark) represents a value that is not a number, text, tensor,
array, list, tuple, or dict with string keys. An object that is found twice is captured once.
Nothing is pickled.
"""

from __future__ import annotations

from elastic_dp.checkpoint.python_objects.capture import Capture, held_in
from elastic_dp.checkpoint.python_objects.object_kinds import MARK, MISSING, References
from elastic_dp.checkpoint.python_objects.restore import Plain, Restore

__all__ = ["MARK", "MISSING", "Capture", "Plain", "References", "Restore", "held_in"]

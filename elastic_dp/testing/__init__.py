"""For your own tests: a run on plain processes instead of Ray, and faults at named points of
training.

Nothing in training imports this package.
"""

from elastic_dp.testing.process_worker_group import ProcessRun
from elastic_dp.train.fault_injection import WorkerFault

__all__ = ["ProcessRun", "WorkerFault"]

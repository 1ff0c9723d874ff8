"""A run on a Ray cluster: `trainer` starts it, `controller` leads it, `worker` trains in it, and
`run_handle` is the driver's view.

- `heartbeat/`: shows that a worker is alive, and renews its lease.
- `ray/`: actors, node selection and the state of the cluster. Ray is imported here, and where runs
  are found.
- `runs/`: how a run is recorded, found and attached to.
"""

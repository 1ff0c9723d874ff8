"""A run on a Ray cluster: `trainer` starts it, `controller` leads it, `worker` trains in it,
`run_handle` is its driver's view.

- `heartbeat/`: what shows that a worker lives, and gives it its lease.
- `ray/`: actors, node selection and what is known of the cluster; Ray is imported here, and where
  runs are found.
- `runs/`: how a run is recorded, found and attached to.
"""

"""What shows that a worker lives: a sidecar process beside it, the memory that both share, and the
controller's socket."""

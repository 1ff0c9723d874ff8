"""What a run records of itself: its journal of events and metrics, its goodput, its loggers."""

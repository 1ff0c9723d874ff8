"""Several runs share one Ray cluster, by priority."""

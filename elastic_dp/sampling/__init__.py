"""Which rows and which random numbers: pure arithmetic on (seed, step, virtual worker)."""

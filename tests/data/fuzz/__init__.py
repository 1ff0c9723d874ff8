"""Structure-aware fuzzing of the data formats: see running.py."""

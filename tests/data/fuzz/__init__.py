"""Structure-aware fuzzing of the data formats: see running.py. `python -m benchmarks.fuzz_data`
runs many inputs."""

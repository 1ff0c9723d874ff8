"""Finds what the body of a loop changes and a worker that joins would not have."""

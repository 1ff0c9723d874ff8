"""Columns of a data set: their types, one schema of many shards, nulls, and Arrow's memory as
arrays."""

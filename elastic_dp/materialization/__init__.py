"""Rows of an iterable, written once as shards. Only the driver imports it."""

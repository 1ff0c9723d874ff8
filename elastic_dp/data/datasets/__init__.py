"""The data sets that training reads: shards at a URL, and map-style datasets."""

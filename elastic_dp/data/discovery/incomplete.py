"""The mark of a data set that is still being written, or whose writer was killed."""

INCOMPLETE = "_incomplete"  # an object that is there while `write_shards` writes to a store

"""The formats that shards may have, one file each; `format_registry` has them all by name."""

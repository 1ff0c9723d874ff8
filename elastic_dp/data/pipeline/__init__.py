"""From row groups in a store to micro-batches in memory, ahead of the step that takes them."""

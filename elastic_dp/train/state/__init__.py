"""The state that a step changes, and the units in which it is compared, moved and written."""

"""Entering and leaving a generation: its group, its commands, and the state that members send."""

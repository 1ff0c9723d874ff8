"""Processes that wait on the nodes for new workers, and what they import before they get one."""

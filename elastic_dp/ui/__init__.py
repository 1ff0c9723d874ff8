"""Serves the report of a run while it goes on, and steers it, for those who have the token."""

"""Serves the reports of runs while they go on, and steers runs, for those who have the token."""

"""Every worker of the run: how it stands, whether it lives and goes on, and what its loss costs."""

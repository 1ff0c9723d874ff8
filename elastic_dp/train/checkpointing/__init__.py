"""When a checkpoint is due, who writes which part of it, its commit, its restore."""

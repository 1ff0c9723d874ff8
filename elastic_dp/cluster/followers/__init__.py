"""The processes of a worker beside its first one."""

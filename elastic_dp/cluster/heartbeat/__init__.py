"""Heartbeats: a sidecar process beside each worker, the memory that both share, and the
controller's socket.
"""

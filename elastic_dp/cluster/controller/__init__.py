"""The controller process: `controller` runs the coordinator; each other module owns one part of the
state.
"""

"""The process side of the controller: `controller` runs the coordinator, each other module here
owns one part of its state."""

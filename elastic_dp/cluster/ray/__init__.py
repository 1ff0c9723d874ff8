"""What is Ray's own: the actors, the nodes that they may run on, and what Ray says of its
cluster."""

"""What the package offers beyond its core. Nothing in the core imports it: the core loads a part by
its name, and knows it by a protocol."""

"""What the package offers beyond its core. Nothing outside of this folder imports it: the core
loads a part by its name, and knows it by a protocol."""

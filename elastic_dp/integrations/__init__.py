"""Adapters for training libraries: each runs the library's own objects by `ctx.steps`.

They use the public interface of this package only, as a user's train function does. Nothing here is
imported unless the user imports it, so each library is needed by its own module alone.
"""

"""How a run is recorded, found and attached to: in its folder, in the GCS, and by the names of its
actors.
"""

"""How a train step is cut into stages, shards, microbatches and tasks.

Imports `trace` and `schedule` only.
"""

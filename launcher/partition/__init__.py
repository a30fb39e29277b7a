"""Partition a train step into stages, shards, microbatches and tasks.

Imports `trace` and `schedule` only.
"""

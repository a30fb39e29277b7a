"""Batches, files and tokens that datasets share."""

"""Trackers that record a run, and their registry."""

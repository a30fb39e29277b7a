"""Observation of a step: recordings, device profiles, digests, compilation as text."""

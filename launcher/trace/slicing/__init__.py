"""Meaning of a slice: how the loss on part of a batch relates to that on all of it."""

"""Stacks of dense layers: settings and model."""

"""Compiled programs of stages."""

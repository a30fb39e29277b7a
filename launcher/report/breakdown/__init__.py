"""Breakdown of the time of a step and of a run, predicted beside measured."""

"""Costs that are measured: layers compiled and timed on the devices of this machine."""

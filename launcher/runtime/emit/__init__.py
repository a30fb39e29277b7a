"""Lowering of a placed step to instruction lists. Pure."""

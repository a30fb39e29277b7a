"""Readers of traced programs: jaxprs, factors, costs, kinds of primitives."""

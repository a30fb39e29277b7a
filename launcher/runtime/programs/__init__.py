"""Compiled programs of stages, and the one module of JAX's private names."""

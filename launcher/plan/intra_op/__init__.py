"""Intra-operator parallelism: how the arrays of one stage are sharded over its submesh."""

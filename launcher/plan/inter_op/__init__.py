"""Inter-operator parallelism: which layers become which stage, on which submesh."""

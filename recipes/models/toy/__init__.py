"""A small network written with Flax NNX: settings and model."""

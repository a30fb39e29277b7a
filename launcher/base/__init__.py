"""Foundations that know nothing of JAX or of training: log, output, signals, files, versions."""

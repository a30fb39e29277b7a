"""Mixtures of corpora: settings and data."""

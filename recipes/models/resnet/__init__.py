"""Residual networks: settings and model."""

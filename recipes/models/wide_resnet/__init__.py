"""Wide residual networks: settings and model."""

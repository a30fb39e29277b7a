"""U-Nets: settings and model."""

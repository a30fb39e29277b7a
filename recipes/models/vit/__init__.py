"""Vision Transformers: settings and model."""

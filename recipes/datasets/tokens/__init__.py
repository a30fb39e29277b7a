"""Token files: settings and data."""

"""Pictures on disk: settings and data."""

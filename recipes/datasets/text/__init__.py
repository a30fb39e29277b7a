"""Text as bytes: settings and data."""

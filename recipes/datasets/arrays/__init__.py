"""The user's own arrays: settings and data."""

"""Made-up data: settings and data."""

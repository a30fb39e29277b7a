"""Documents, tokenised before training: settings and data."""

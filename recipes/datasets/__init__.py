"""Dataset families, a folder each."""

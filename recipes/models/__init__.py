"""Model families, a folder each, and the parts that they share."""

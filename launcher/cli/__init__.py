"""Command line: `python -m launcher`, `launcher runs`, `launcher new`."""

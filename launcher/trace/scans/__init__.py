"""Scans over stacked layers, opened into one layer an iteration."""

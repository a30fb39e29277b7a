"""Reports as pages: one HTML file each, which needs nothing else and asks no network. Pure.

Whatever comes from a run, its id and settings included, is escaped.
"""

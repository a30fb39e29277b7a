"""Reports as pages: one HTML file each, which needs nothing else and asks no network. Pure.

Content from a run, its id and settings included, is escaped.
"""

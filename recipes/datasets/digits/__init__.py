"""Scikit-learn's digits: settings and data."""

"""Execution of instruction lists."""

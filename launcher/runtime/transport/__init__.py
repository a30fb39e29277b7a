"""Transfers of arrays between stages, processes and parameter servers."""

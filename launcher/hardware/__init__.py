"""Devices and clusters as data: datasheets, memory shares, shapes."""

"""A run's folder: its owner, its content, and the run that is resumed in it.

`folder` checks and claims it, compares it with the settings, holds it open and writes settings and
plan; `status` shows in it the state of the run. `make_folder` keeps it from other users. It imports
no other room of the driver but `callback`.
"""

"""A run's folder: its owner, its content, and the run that is resumed in it.

`folder` checks and claims it, holds it open and writes settings and plan, `identity` compares it
with the settings, and `status` shows in it the state of the run. `make_folder` keeps it from other
users. It imports no other room of the driver but `callback`.
"""

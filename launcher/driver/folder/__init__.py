"""A run's folder: its owner, its content, and the run that is resumed in it.

`folder` checks and claims it and holds it open, `identity` compares it with the settings, `status`
shows in it the state of the run, and `plan_files` are its settings and plan. `make_folder` and
`private_files` keep it from other users. It imports no other room of the driver but `callback`.
"""

"""A run's folder: who owns it, what is in it, and which run goes on in it.

`folder` checks and claims it, `folder_handle` holds it while it may be moved, `identity` compares
it with the settings, and `status` says in it what the run is doing. `make_folder` and
`private_files` keep it from other users. It imports no other room of the driver; all may import it.
"""

"""The processes a plan runs on: which devices there are, a private Ray, one worker a host.

`devices` finds them, `session` brings Ray up and starts the workers, `slurm_*` does both on the
nodes of a batch job, `handle` is how the driver talks to a worker. `launcher.train` and the command
line may import it; it imports `launcher.config`.
"""

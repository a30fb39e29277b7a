"""The processes that a plan runs on: which devices there are, Ray, Slurm, the group of workers.

`devices` finds the devices, `ray` brings the workers up, `slurm` does so on the nodes of a batch
job, `process_group` connects them, and `worker_group` is how both doors talk to all of them.
"""

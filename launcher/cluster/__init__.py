"""Processes that run a plan: devices, Ray, Slurm, and the group of workers.

`devices` finds the devices, `ray` starts a worker process on each host, `slurm` brings up the nodes
of a batch job, `process_group` connects the workers, and `worker_group` talks to all of them.
"""

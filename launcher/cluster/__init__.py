"""Processes that run a plan: kinds of clusters, devices, Ray, Slurm, and the group of workers.

`kinds` has a class for each kind of cluster, `devices` finds the devices of this machine, `ray`
starts a worker process on each host, `slurm` brings up the nodes of a batch job, `process_group`
connects the workers, and `worker_group` calls all of them.
"""

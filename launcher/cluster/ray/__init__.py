"""Processes through Ray: a private one, which the driver starts and ends, or one that is there.

`private_ray` brings Ray up and starts the workers, `attached_ray` starts them on a Ray of the
user's; `worker` is how the driver talks to a worker, `worker_actor` what runs in it first.
"""

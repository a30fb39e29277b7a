"""Worker processes through Ray: a private Ray that the driver starts and ends, or the user's own.

`private_ray` starts a Ray and its workers, and `attached_ray` starts workers on the user's Ray.
`worker` is the driver's handle to a worker, and `worker_actor` is the actor that runs in it.
`ray_compat` has what Ray does not document. Only this package imports Ray.
"""

"""Worker processes through Ray: a private Ray that the driver starts and ends, or the user's own.

`private_ray` starts a Ray and its workers; `attached_ray` starts workers on a Ray that is there,
which `reach` asks for its nodes and `demand` compares with what the workers demand.
`worker` is the driver's handle to a worker, and `worker_actor` is the actor that runs in it.
`ray_compat` has what Ray does not document. Only this package imports Ray.
"""

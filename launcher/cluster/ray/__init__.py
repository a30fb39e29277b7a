"""Worker processes through Ray: a private Ray that the driver starts and ends, or an existing one.

`session` starts processes on either: `private_ray` brings up a Ray of its own, `existing_ray` joins
one and checks that its nodes could ever hold the workers. `worker` is the driver's handle to a
worker, and `worker_actor` is the actor that runs in it. `node_folder` writes files on another node.
`ray_compat` has all undocumented parts of Ray. Only this package imports Ray.
"""

from launcher.cluster.ray.node_folder import NodeFolder as NodeFolder

"""Names of the transports between worker processes, and their classes."""

TRANSPORTS = {
    "pull": "launcher.runtime.transport.pull:PullTransport",
    "collective": "launcher.runtime.transport.permute:PermuteTransport",
}
"""By `cluster.transport`, the path of a class; `auto` takes the first that suits the devices."""

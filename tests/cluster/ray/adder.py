"""A worker that only exchanges arrays; it is up soon, since it imports no JAX."""

from types import SimpleNamespace

import numpy as np

from launcher.cluster.ray.parameter_server import ServerClient


class Adder:
    """Three exchanges, one with each of three servers; the second joins, the others add."""

    def meet(self, count, index, servers, seconds):
        self.servers = ServerClient(index, count, servers, seconds)
        kinds = enumerate(("sum", "gather", "sum"))
        self.servers.open(
            [SimpleNamespace(name=f"bucket {n}", kind=kind, axis=0, server=n) for n, kind in kinds]
        )

    def exchange(self, size):
        """The last number and the size of each whole; all parts are given first."""
        call = self.servers.reserve()
        for number in range(3):
            part = np.full(size, 10.0 ** (number + 3 * self.servers.rank), np.float32)
            self.servers.put(call, number, part)
        wholes = [self.servers.get(call, number) for number in range(3)]
        assert not any(whole.flags.writeable for whole in wholes)
        return [float(whole[-1]) for whole in wholes], [whole.size for whole in wholes]

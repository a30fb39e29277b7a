"""A model with its adapters added, on one device."""

import numpy as np

from launcher.checkpoint.train_state import adapters_of, map_named, without_adapters


def merge(params, options):
    """Return the model's own parameters with the adapters added, if there are any."""
    adapters = adapters_of(params)

    def added(name, kernel):
        if name not in adapters:
            return kernel
        a, b = (np.asarray(x) for x in adapters[name])  # not as the launcher does it
        return kernel + options.alpha / options.rank * (a @ b).reshape(kernel.shape)

    return map_named(added, without_adapters(params))

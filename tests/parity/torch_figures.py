"""Make the figures of PyTorch that `test_torch.py` holds trainings against; by hand, with PyTorch.

    python tests/parity/torch_figures.py    # pip install torch==2.13.0 numpy

Writes `toy.npz` (the model of PyTorch's DDP tutorial) and `mlp.npz` beside it: one file holds the
data (`x`, `y`), the start (`params.…`, kernels as [inputs, outputs]) and, of each training, the
losses and the last parameters. A batch is the next rows of the data, pass after pass. PyTorch
trains on one device and the whole batch, of which DistributedDataParallel is the mean.
"""

import itertools
from pathlib import Path

import numpy as np
import torch

ROWS, BATCH = 96, 32
SIZES = {"toy": (10, 10, 5), "mlp": (12, 24, 16, 6)}
RATES = {"toy": 1e-3, "mlp": 0.1}  # of gradient descent
# By type: which optimizers, and how many steps.
TRAININGS = {"float64": (("sgd", "adam"), 50), "float32": (("sgd",), 10)}


def drawn(seed, sizes):
    """The data and the start, float64."""
    rng = np.random.default_rng(seed)
    arrays = {
        "x": rng.standard_normal((ROWS, sizes[0])),
        "y": rng.standard_normal((ROWS, sizes[-1])),
    }
    for i, (rows, columns) in enumerate(itertools.pairwise(sizes)):
        bound = rows**-0.5  # as torch.nn.Linear draws them
        arrays[f"{layer(i, sizes)}.kernel"] = rng.uniform(-bound, bound, (rows, columns))
        arrays[f"{layer(i, sizes)}.bias"] = rng.uniform(-bound, bound, columns)
    return arrays


def layer(index, sizes):
    return "params.output_layer" if index == len(sizes) - 2 else f"params.layers_{index}"


def optimizer_of(name, optimizer, params):
    if optimizer == "sgd":
        return torch.optim.SGD(params, lr=RATES[name])
    return torch.optim.Adam(params, lr=1e-3)


def trained(arrays, name, dtype, optimizer, steps):
    """The losses before each update, and the parameters after the last."""
    sizes = SIZES[name]
    layers = [layer(i, sizes) for i in range(len(sizes) - 1)]
    linears = [torch.nn.Linear(a, b, dtype=dtype) for a, b in itertools.pairwise(sizes)]
    with torch.no_grad():
        for one, linear in zip(layers, linears, strict=True):
            linear.weight.copy_(torch.from_numpy(arrays[f"{one}.kernel"].T))
            linear.bias.copy_(torch.from_numpy(arrays[f"{one}.bias"]))
    parts = [part for linear in linears for part in (linear, torch.nn.ReLU())][:-1]
    model = torch.nn.Sequential(*parts)
    update = optimizer_of(name, optimizer, model.parameters())
    x, y = (torch.from_numpy(arrays[name]).to(dtype) for name in ("x", "y"))
    losses = []
    for step in range(steps):
        rows = torch.arange(step * BATCH, (step + 1) * BATCH) % ROWS
        update.zero_grad()
        loss = torch.nn.functional.mse_loss(model(x[rows]), y[rows])
        losses.append(loss.item())
        loss.backward()
        update.step()
    last = {}
    for one, linear in zip(layers, linears, strict=True):
        last[f"{one}.kernel"] = linear.weight.detach().numpy().T
        last[f"{one}.bias"] = linear.bias.detach().numpy()
    return np.array(losses), last


def main():
    torch.manual_seed(0)
    torch.set_num_threads(1)
    for seed, (name, sizes) in enumerate(SIZES.items()):
        arrays = drawn(seed, sizes)
        figures = {}
        for dtype, (optimizers, steps) in TRAININGS.items():
            for optimizer in optimizers:
                training = f"torch.{dtype}.{optimizer}"
                losses, last = trained(arrays, name, getattr(torch, dtype), optimizer, steps)
                figures[f"{training}.losses"] = losses
                figures |= {f"{training}.{leaf}": value for leaf, value in last.items()}
        np.savez(Path(__file__).with_name(f"{name}.npz"), **arrays, **figures)


main()

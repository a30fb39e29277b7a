"""Flax NNX modules as models: `launcher.nnx.model(make, loss)`."""

from launcher.recipes.models.nnx import model as model
from launcher.recipes.models.nnx import module as module

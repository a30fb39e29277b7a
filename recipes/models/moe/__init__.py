"""The settings of a mixture of experts: Llama's, and those of its experts."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Self

from launcher.config.errors import ConfigError
from launcher.config.families import register
from launcher.config.fields import number
from launcher.recipes.models.llama import LlamaOptions
from launcher.recipes.models.sizes import dimension, feature, uneven


@register
@dataclass(frozen=True)
class MoEOptions(LlamaOptions):
    """A Llama whose MLPs are mixtures of experts; see `LlamaOptions`."""

    name: str = "moe"
    num_experts: int = dimension()
    experts_per_token: int = feature(2, 1)
    expert_size: int = feature(None, 1)  # mlp_size
    shared_size: int = feature(0, 0)
    expert_every: int = feature(1, 1)
    capacity_factor: float = feature(1.25, 0.0)
    group_size: int = feature(None, 1)  # sequence_length
    balance_loss: float = number(0.01, minimum=0.0)
    router_z_loss: float = number(0.001, minimum=0.0)

    def filled(self) -> Self:
        """Return the settings with all of a size's set, also those that follow from others."""
        found = super().filled()
        return dataclasses.replace(
            found,
            expert_size=found.expert_size or found.mlp_size,
            group_size=found.group_size or found.sequence_length,
        )

    def check(self) -> Iterator[ConfigError]:
        """Yield an error for a routing that is impossible."""
        yield from super().check()
        chosen, there = self.experts_per_token, self.num_experts
        if chosen and there and chosen > there:
            yield ConfigError(
                f"model.experts_per_token={chosen} is more than model.num_experts={there}",
                keys=["model.experts_per_token", "model.num_experts"],
            )
        yield from uneven(self, ("sequence_length", "group_size"))
        if self.scan_layers and (self.expert_every or 1) > 1:
            yield ConfigError(
                f"model.scan_layers=true needs equal layers, and only one in "
                f"model.expert_every={self.expert_every} has experts",
                "Set model.scan_layers=false, or model.expert_every=1.",
                ["model.scan_layers", "model.expert_every"],
            )

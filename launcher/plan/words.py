"""A plan in words."""

from __future__ import annotations

from launcher.plan.stage_plan import Staged


def describe_plan(plan: Staged) -> str:
    """Return a plan in a few words: stages, meshes, microbatches, schedule, rematerialisation."""
    shapes = list(dict.fromkeys(stage.logical_mesh for stage in plan.stages))
    meshes = " and ".join(f"{data}x{model}" for data, model in shapes[:3])
    remat = sorted({stage.remat for stage in plan.stages} - {"none"})
    count = len(plan.stages)
    parts = [
        f"{count} stage{'s' if count > 1 else ''} of {meshes}{' …' if len(shapes) > 3 else ''}",
        f"{plan.num_micro_batches} microbatch{'es' if plan.num_micro_batches > 1 else ''}",
        plan.schedule,
        *([f"remat {' and '.join(remat[:3])}{' …' if len(remat) > 3 else ''}"] if remat else []),
    ]
    return ", ".join(parts)

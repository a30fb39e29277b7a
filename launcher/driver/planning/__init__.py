"""From settings to a plan, without a run's workers.

`prepare` leads through it: `check` looks at data and devices, `cluster_from_config` builds the
shape to plan for, and `plan_from_config` the plan; `fitting` advises where it does not fit.
`candidates` uses earlier trials. It imports `folder` alone of the driver's rooms; `tasks`, `record`
and what lies beside these folders may import it.
"""

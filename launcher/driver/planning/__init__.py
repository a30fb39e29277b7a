"""From settings to a plan, without a run's workers.

`prepare` leads through it: `check` looks at what is here, `cluster_from_config` says what shape to
plan for, and `plan_from_config` which plan the settings mean; `fitting` says what would fit
instead. `candidates` adds what was measured before. It imports `folder` alone of the
driver's rooms; `tasks`, `record` and what lies beside these folders may import it.
"""

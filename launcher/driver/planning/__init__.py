"""From settings to a plan, without a run's workers.

`prepare` leads through it: `check` looks at data and devices, `init_from` and `replay` at what a
run starts from, and `plan_from_config` makes the plan or advises where it does not fit. It imports
`folder` alone of the driver's rooms; `tasks`, `record` and the modules beside these folders may
import it.
"""

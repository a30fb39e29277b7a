"""The record of a run: its metrics, trackers, breakdown, pictures and summary.

`step_log` takes the steps from the loop, and `run_log` passes them to the trackers and sums the run
up. `accounting` divides the time; `best` and `samples` follow the steps.
It may import the rooms below it; only the modules beside these rooms may import it.
"""

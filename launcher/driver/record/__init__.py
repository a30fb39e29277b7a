"""Records of a run in training, and reactions to them.

`recorder` takes the steps from the loop, and `run_log` hands them to the trackers and sums the run
up. `accounts`, `wall_clock` and `timelines` say where the time goes; `best`, `hooks` and `samples`
follow the steps. It may import the other three rooms; only what lies beside them may import it.
"""

"""What did a run do? Trackers, the plan as a table, the closing summary, plots and sweeps.

It reads plans and settings and writes files and text; it starts nothing, and knows neither JAX nor
Ray. `launcher.train` and the front doors import it.
"""

"""A Slurm job: its script, submitting it, what it is given, and how its tasks find one another."""

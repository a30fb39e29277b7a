"""A Slurm job: its script, its submission, its allocation, and the rendezvous of its tasks."""

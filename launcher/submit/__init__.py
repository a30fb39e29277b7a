"""Runs in other processes: batch jobs on Slurm, sweeps on Slurm, sweeps on this machine."""

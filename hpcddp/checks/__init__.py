"""Checks of a job by one process, beyond its place among the ranks. Functions over values."""

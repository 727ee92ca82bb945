"""The process that a job script becomes: it chooses the run, starts the launcher, and stays until all has ended."""

"""The environment side: which rank a process is, and where rank 0 is. Standard library only."""

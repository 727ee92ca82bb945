"""The run folder: its paths, its JSON, its state and attempts, and comparing two runs. Standard library only."""

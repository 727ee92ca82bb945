"""`hpcddp verify`: a training script run a few times in short, on several numbers of ranks, and what differed."""

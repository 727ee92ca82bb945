"""What a run writes for the attempts that follow, and how they resume from it."""

"""What a run writes into its folder, and how it goes on from there."""

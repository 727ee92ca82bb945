"""The layout of the ranks, and the ways to distribute a model over them."""

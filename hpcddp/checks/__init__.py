"""What one process can see to be wrong with its job, beyond its place among the ranks. Functions over values."""

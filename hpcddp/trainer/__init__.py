"""The reference trainer: a user of `hpcddp.training`, as any other script is."""

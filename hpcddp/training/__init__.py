"""The training side: process group, global batch, checkpoints, stopping in time, and the reference trainer.

The only part of the package that imports torch. Training scripts come in through `hpcddp.init()` and
`hpcddp.runtime()`.
"""

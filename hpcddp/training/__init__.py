"""The training side: process group, global batch, checkpoints, stopping in time.

Training scripts come in through `hpcddp.init()` and
`hpcddp.runtime()`.
"""

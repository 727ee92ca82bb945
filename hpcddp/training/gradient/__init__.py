"""Gradient of the global batch from those of micro batches: averaged by DDP or FSDP, or exact."""

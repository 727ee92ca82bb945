"""From the gradients of micro batches to the gradient of the global batch: averaged by DDP or FSDP, or exact."""

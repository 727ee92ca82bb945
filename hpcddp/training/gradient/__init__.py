"""From the micro batches' gradients to the global batch's: averaged by DDP, in parts, or exactly."""

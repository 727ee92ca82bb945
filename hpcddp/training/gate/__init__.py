"""What acts once per pass over a global batch: optimizers, schedulers, gradient scalers, averages; and their checks."""

"""Which samples a rank sees, in what order, and what each micro batch weighs."""

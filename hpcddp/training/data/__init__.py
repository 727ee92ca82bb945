"""Which samples a data rank sees, in what order, and what each micro batch weighs."""

"""How much memory a model's training takes per rank under each way to split it, and which way to choose.

`memory` has the arithmetic and what it needs of a model, `transformer` makes that from a few numbers, `measure` (torch)
from a model on the meta device; `choice` chooses, `report` writes.
"""

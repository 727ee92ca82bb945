"""How much memory a model's training takes per rank under each way to split it, and which way to choose.

`shape` says what the arithmetic needs of a model, `transformer` makes it from a few numbers, `measure` (torch) from a
model on the meta device. `memory` has the arithmetic, `choice` chooses, `text` writes.
"""

"""Advantages, losses, aggregation and KL: pure functions on arrays and tensors, which know no model and no batch."""

"""Advantages, losses, aggregation and KL: pure functions of arrays and tensors, independent of models and micro-batches."""

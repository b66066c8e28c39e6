"""Datasets: rows in files become typed tasks, in an order that can be resumed."""

"""Datasets: turns rows in files into typed tasks, in a resumable order."""

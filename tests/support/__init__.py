"""What only the tests and the benchmarks of polyturn itself need."""

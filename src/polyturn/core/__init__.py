"""The core types: stdlib and NumPy only. Everything else leans on this folder, and it leans on nothing."""

"""The core types: stdlib and NumPy only. All other packages import this one; it imports none of them."""

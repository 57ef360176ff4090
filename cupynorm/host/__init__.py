"""The ops on NumPy arrays."""

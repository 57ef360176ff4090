"""The transformer encoder's parts: its steps on a device and on NumPy arrays, and its own kernels."""

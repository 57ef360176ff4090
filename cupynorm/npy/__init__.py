""".npy files: read by blocks of rows, and written under a temporary name until they are complete."""

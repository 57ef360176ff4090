"""The device, the compiler, caches on disk, and launches."""

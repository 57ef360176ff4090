"""From a user's arrays and options to a checked call. Nothing here knows CUDA."""

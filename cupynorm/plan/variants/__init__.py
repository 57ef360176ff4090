"""One file for each kernel: which rows it can hold, and its plan for them."""

"""The public functions: what a user calls, and what it returns."""

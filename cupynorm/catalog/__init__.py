"""The list of all ops, and of the forms in which they are called. Tests, tools and the command use it."""

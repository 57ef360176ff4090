"""What exists, once: the ops, and the forms in which they are called. Tests, tools and the command go by it."""

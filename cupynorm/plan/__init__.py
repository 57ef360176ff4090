"""From the numbers of a problem to a plan: which kernel, with which template arguments, in which launch."""

"""The work of the command: explain, measure, tune, test, and process files."""

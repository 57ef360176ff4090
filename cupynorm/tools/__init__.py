"""What the command does: explain, measure, tune, test, and process files."""

"""Changes that are applied row by row, in the order of the source."""

"""The log of a Delta table: read, written, and committed to."""

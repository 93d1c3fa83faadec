"""The data files of a Delta table, their vectors and key indexes."""

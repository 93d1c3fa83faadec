"""Delta tables, written by `deltalake` and Arrow."""

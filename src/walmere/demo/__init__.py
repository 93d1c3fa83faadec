"""`walmere demo`."""

"""The Delta sink."""

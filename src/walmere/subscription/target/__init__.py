"""The target of a subscription: its sink, its owner, its state at the start, its upkeep."""

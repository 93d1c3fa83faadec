"""Where changes land. `base` is the contract every sink keeps; one module per target."""

"""All access to the source server. No other package connects to it."""

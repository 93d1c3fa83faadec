"""The state of a subscription in an object store."""

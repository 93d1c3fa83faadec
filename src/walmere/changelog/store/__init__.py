"""The change log in an object store."""

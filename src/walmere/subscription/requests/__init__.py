"""Requests of other commands to the running process, as files or in the store."""

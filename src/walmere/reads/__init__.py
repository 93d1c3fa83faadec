"""Reads of a lake as of one point of the source."""

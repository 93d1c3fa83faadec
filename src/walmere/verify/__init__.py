"""Proof that source and target agree at an LSN.

point          a snapshot of the source, and the target's versions at the very same LSN
pieces         both sides of a table, as work for tasks
fingerprint    what is left of any number of rows, to compare both sides by
sample         a part of a table that is the same on both sides
rows           row by row, where fingerprints differ
proof          all of it together, table by table
"""

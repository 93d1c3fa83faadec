"""Proof that source and target agree at an LSN.

run            the command: waits for the tables, finds a point, compares, retries
point          a snapshot of the source, and the target's versions at the same LSN
proof          compares all tables, each in many tasks
pieces         both sides of a table, as work for tasks
source_text    the source's rows: PostgreSQL's text from COPY
pg_text        the target's values, written as PostgreSQL's text
fingerprint    a summary of any number of rows, to compare both sides by
rows           compares row by row, where fingerprints differ
sample         a part of a table that is the same on both sides
"""

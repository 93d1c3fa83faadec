"""Benchmarks. Each one compares Walmere with a limit tool, in the same run, on its own PostgreSQL server."""

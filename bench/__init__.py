"""Benchmarks: each beside the tool that marks the limit, in one run, on a server of its own."""

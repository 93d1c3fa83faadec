"""The command `walmere`."""

from walmere.cli.app import main

__all__ = ["main"]

"""`python -m walmere`."""

from walmere.cli import main

main()

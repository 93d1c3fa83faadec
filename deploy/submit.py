"""The program for spark-submit: `spark-submit … submit.py run -c walmere.toml`, with the arguments of `walmere`."""

from walmere.cli import main

main()

"""``python -m lln``: the command line where its program is not on the path."""

from lln.cli import main

main()

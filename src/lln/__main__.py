"""``python -m lln``: the command line, for when the ``lln`` program is not on the PATH."""

from lln_command import main

main()

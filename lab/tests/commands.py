"""The command line with the laboratory, whether that is installed or not."""

from lln.cli import with_commands
from lln_lab.cli import add_to

app = with_commands(add_to)

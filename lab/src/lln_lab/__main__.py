"""``python -m lln_lab``: the program ``lln`` of a checkout that is not installed."""

from lln.cli import main
from lln_lab.cli import add_to

main(add_to)

"""The commands that the laboratory adds to ``lln``, one file per group, without loading torch."""

from lln_lab.cli.commands import add_to

__all__ = ["add_to"]

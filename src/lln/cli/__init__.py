"""The command line: ``lln doctor | convert | …``, and what its commands share."""

from lln.cli.app import app, main, with_commands

__all__ = ["app", "main", "with_commands"]

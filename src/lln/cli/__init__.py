"""The command line: ``lln demo | inspect | figure | bench | peers | convert | recover | …``."""

from lln.cli.app import app, main

__all__ = ["app", "main"]

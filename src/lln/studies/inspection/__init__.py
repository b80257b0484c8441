"""``lln inspect``: how a model's attention concentrates, head by head, as one page to read."""

from lln.studies.inspection.command import run_inspect

__all__ = ["run_inspect"]

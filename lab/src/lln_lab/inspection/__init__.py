"""``lln inspect``: how concentrated a model's attention is, head by head, as one HTML page."""

from lln_lab.inspection.command import run_inspect

__all__ = ["run_inspect"]

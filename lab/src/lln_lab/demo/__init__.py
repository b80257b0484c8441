"""``lln demo``: what LLN attention does, measured on this machine, as one HTML page."""

from lln_lab.demo.command import run_demo

__all__ = ["run_demo"]

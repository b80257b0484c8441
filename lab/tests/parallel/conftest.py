"""Ranks, which are processes."""

from tests.parallel.conftest import pool  # noqa: F401

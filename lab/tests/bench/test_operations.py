"""What an operation does around the call that is timed."""

import os
import sys
import types

import pytest
import torch

from lln_lab.bench.operations import OPERATIONS


@pytest.mark.parametrize("already", [None, "1"])
def test_fla_chooses_its_tiles_anew_unless_told_otherwise(monkeypatch, already):
    """A choice kept on disk may have been made while something else used the GPU."""
    seen = {}

    def chunk_linear_attn(query, key, value, normalize):
        seen.update(normalize=normalize, cache=os.environ["FLA_CACHE_RESULTS"])
        return query, None

    for package in ("fla", "fla.ops", "fla.ops.linear_attn"):
        fake = types.ModuleType(package)
        fake.chunk_linear_attn = chunk_linear_attn
        monkeypatch.setitem(sys.modules, package, fake)
    # Set first, so that what the operation sets is taken back.
    monkeypatch.setenv("FLA_CACHE_RESULTS", already or "")
    if already is None:
        monkeypatch.delenv("FLA_CACHE_RESULTS")
    for name, normalised in (("fla_causal", True), ("fla_causal_raw", False)):
        OPERATIONS[name].run(*torch.zeros(3, 1))
        assert seen == {"normalize": normalised, "cache": already or "0"}

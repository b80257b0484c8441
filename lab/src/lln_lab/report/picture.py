"""Attention matrices as small pictures inside the page."""

from __future__ import annotations

import base64
import io
from typing import Any

import torch
from torch import Tensor

from lln_lab.report.theme import SEQUENTIAL

# Colours span this many powers of two on both sides of uniform attention.
OCTAVES = 4


def matrix_picture(weights: Tensor) -> str:
    """A PNG of N·P ``[rows, columns]`` as a ``data:`` URL; 1 is uniform attention."""
    from matplotlib.image import imsave

    level = weights.double().clamp_min(1e-12).log2()
    file = io.BytesIO()
    # Without matplotlib's version, so that the same matrix always gives the same text.
    options: Any = {"format": "png", "metadata": {"Software": None}}
    imsave(file, level.numpy(), vmin=-OCTAVES, vmax=OCTAVES, cmap=SEQUENTIAL, **options)
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode('ascii')}"


def colour_bar() -> str:
    """All colours of the pictures, from left to right."""
    return matrix_picture(2 ** torch.linspace(-OCTAVES, OCTAVES, 128)[None])

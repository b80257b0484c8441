"""Attention matrices as small pictures: a PNG encoder of the few lines that this needs."""

from __future__ import annotations

import base64
import struct
import zlib
from html import escape

import torch
from torch import Tensor

Stops = tuple[tuple[int, int, int], ...]

# Even steps in lightness from dark blue to yellow, and told apart with any colour vision.
SEQUENTIAL: Stops = ((0, 32, 77), (59, 73, 108), (124, 123, 120), (188, 175, 111), (255, 234, 70))
# For numbers of both signs: blue below zero, nearly white at zero, orange above.
DIVERGING: Stops = ((20, 74, 138), (118, 165, 209), (242, 241, 237), (233, 163, 112), (158, 64, 8))
# Colours span this many powers of two on both sides of even attention.
OCTAVES = 4


def matrix_picture(weights: Tensor, alt: str) -> str:
    """``<img>`` of a matrix of N·P ``[rows, columns]``: 1 is even attention, the middle colour."""
    level = (weights.double().clamp_min(1e-12).log2() / OCTAVES).clamp(-1, 1)
    index = ((level + 1) * 127.5).round().to(torch.uint8)
    data = base64.b64encode(_png(index)).decode("ascii")
    return (
        f'<img class="matrix" alt="{escape(alt)}" width="{index.shape[1]}" '
        f'height="{index.shape[0]}" src="data:image/png;base64,{data}">'
    )


def colour_bar() -> str:
    """The scale of the pictures."""
    stops = ",".join("rgb({} {} {})".format(*stop) for stop in SEQUENTIAL)
    labels = "".join(f"<span>{text}</span>" for text in ("1/16", "1/4", "even", "4", "16"))
    return (
        f'<div class="bar"><div class="ramp" style="background:linear-gradient(90deg,{stops})">'
        f'</div><div class="bar-labels">{labels}</div></div>'
    )


def colour_at(fraction: float, stops: Stops = SEQUENTIAL) -> tuple[int, int, int]:
    """Red, green and blue of a place on a scale, 0 = its first colour and 1 = its last."""
    place = min(max(fraction, 0.0), 1.0) * (len(stops) - 1)
    below = min(int(place), len(stops) - 2)
    share = place - below
    red, green, blue = (
        round(low + share * (high - low))
        for low, high in zip(stops[below], stops[below + 1], strict=True)
    )
    return red, green, blue


def _png(index: Tensor) -> bytes:
    """A PNG with 256 colours from indices uint8 ``[rows, columns]``."""
    rows, columns = index.shape
    header = struct.pack(">IIBBBBB", columns, rows, 8, 3, 0, 0, 0)
    # Every row starts with its filter, 0 = none.
    lines = b"".join(b"\0" + bytes(row) for row in index.tolist())
    chunks = (
        (b"IHDR", header),
        (b"PLTE", bytes(_palette())),
        (b"IDAT", zlib.compress(lines, 9)),
        (b"IEND", b""),
    )
    return b"\x89PNG\r\n\x1a\n" + b"".join(_chunk(kind, body) for kind, body in chunks)


def _chunk(kind: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))


def _palette() -> list[int]:
    return [part for index in range(256) for part in colour_at(index / 255)]

"""Which systems are of one kind of idea: the order of tables, and the panels of figures."""

from __future__ import annotations

from lln.errors import InvalidInputError

FAMILIES: dict[str, tuple[str, ...]] = {
    "softmax and LLN": ("softmax", "diag", "lln", "lln_diag"),
    "feature maps": (
        "relu",
        "quadratic",
        "elu",
        "performer",
        "rfa",
        "cosformer",
        "hedgehog",
        "mala",
        "polaformer",
        "nalaformer",
    ),
    "low rank": ("nystromformer", "linformer", "skyformer", "set_transformer", "synthesizer"),
    "windows and patterns": (
        "longformer",
        "transformer_ls",
        "local_global",
        "bigbird",
        "sparse_transformer",
        "blockwise",
        "axial",
    ),
    "sorting and clustering": ("reformer", "sinkhorn", "routing", "clustered"),
    "decay, convolution, gates": (
        "transnormer_t1",
        "transnormer_t2",
        "tnn",
        "flash",
        "lion_d",
        "lion_s",
    ),
}


def family_of(name: str) -> str:
    """The family a system belongs to.

    Raises:
        InvalidInputError: If it is in none.

    Example:
        >>> family_of("elu")
        'feature maps'
    """
    for family, names in FAMILIES.items():
        if name in names:
            return family
    raise InvalidInputError(
        f"{name!r} is in no family; add it to FAMILIES in lln/peers/families.py."
    )

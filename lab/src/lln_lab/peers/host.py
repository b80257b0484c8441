"""What a system knows of the encoder around it."""

from dataclasses import dataclass

from lln.checks.names import shown
from lln.errors import InvalidInputError
from lln_lab.peers.option_checks import check_size


@dataclass(frozen=True, kw_only=True)
class Host:
    """Sizes and place of the layer a peer is built for.

    Attributes:
        embed_dim: Width of the token vectors.
        num_heads: Heads; divides embed_dim.
        max_len: The longest sequence the host will send.
        is_causal: Whether token i may see tokens 0 … i only.
        layer: Index of this layer, for systems whose layers differ (TransNormer, ModernBERT).
        layers: How many layers the host has.
    """

    embed_dim: int
    num_heads: int
    max_len: int
    is_causal: bool = False
    layer: int = 0
    layers: int = 1

    def __post_init__(self) -> None:
        """Refuse sizes that no layer can have."""
        for name in ("embed_dim", "num_heads", "max_len", "layers"):
            check_size(name, getattr(self, name))
        if not isinstance(self.is_causal, bool):
            raise InvalidInputError(
                f"is_causal must be True or False, got {shown(self.is_causal)}."
            )
        if self.embed_dim % self.num_heads:
            raise InvalidInputError(
                f"embed_dim {self.embed_dim} must be a multiple of num_heads {self.num_heads}."
            )
        whole = isinstance(self.layer, int) and not isinstance(self.layer, bool)
        if not whole or self.layer not in range(self.layers):
            raise InvalidInputError(
                f"layer must be one of 0 … {self.layers - 1}, got {shown(self.layer)}."
            )

    @property
    def head_dim(self) -> int:
        """Width of a head."""
        return self.embed_dim // self.num_heads

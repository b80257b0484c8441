"""A host encoder for any system: the same residuals, norms and feed-forward around every one.

Dimension legend: B batch, N tokens, W width of the tokens.
"""

import functools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lln.checks import shape_of
from lln.checks.names import check_choice
from lln.checks.signatures import explain_misfits
from lln.errors import InvalidInputError
from lln_lab.peers.option_checks import check_size
from lln_lab.peers.peer import Mask, check_dtype, check_key_mask, check_vectors, zero_padding
from lln_lab.peers.registry import available, build, card, parameter_count

NORMS = ("pre", "post")
# What torch looks up in an embedding.
WORD_DTYPES = (torch.int64, torch.int32)


class Encoder(nn.Module):
    """Layers of one attention system, and what every system gets around it.

    A core or a mixer takes the place of attention: residual, norm and feed-forward go around it. A
    block brings all of these, so ``layers_per_block`` of its card replace a whole layer.

    Args:
        name: One of `lln_lab.peers.available`.
        depth: Layers of attention and feed-forward; blocks replace as many.
        embed_dim: W.
        num_heads: Heads; divides embed_dim.
        max_len: The longest sequence it will see.
        feed_forward: Inner width of the feed-forward; None = 4 · embed_dim.
        vocabulary: Number of words: the encoder takes words and embeds them and their positions.
            None: it takes token vectors as they are.
        norm: ``"pre"`` (norm before attention and feed-forward, one more at the end) or ``"post"``
            (after each residual). Blocks bring their norms and get the one at the end.
        **options: Of the system, as for `lln_lab.peers.build`, ``is_causal`` included.

    Raises:
        InvalidInputError: One sentence on what does not fit.

    Example:
        >>> encoder = Encoder("elu", depth=2, embed_dim=16, num_heads=2, max_len=64, vocabulary=50)
        >>> encoder(torch.randint(50, (3, 10))).shape
        torch.Size([3, 10, 16])
    """

    @explain_misfits
    def __init__(
        self,
        name: str,
        *,
        depth: int,
        embed_dim: int,
        num_heads: int,
        max_len: int,
        feed_forward: int | None = None,
        vocabulary: int | None = None,
        norm: str = "pre",
        **options: Any,
    ) -> None:
        super().__init__()
        check_choice("norm", norm, NORMS)
        sizes = {"feed_forward": feed_forward, "vocabulary": vocabulary}
        given = {label: size for label, size in sizes.items() if size is not None}
        for label, size in ({"depth": depth} | given).items():
            check_size(label, size)
        self.card, self.max_len, self.vocabulary = card(name), max_len, vocabulary
        self.width = embed_dim
        is_block = self.card.kind == "block"
        layers = depth * (self.card.layers_per_block if is_block else 1)
        options |= {"embed_dim": embed_dim, "num_heads": num_heads, "max_len": max_len}
        systems = [build(name, layer=at, layers=layers, **options) for at in range(layers)]
        inner = feed_forward or 4 * embed_dim
        wrapped = systems if is_block else [_Layer(one, embed_dim, inner, norm) for one in systems]
        self.layers = nn.ModuleList(wrapped)
        self.norm = nn.LayerNorm(embed_dim) if norm == "pre" or is_block else nn.Identity()
        if vocabulary is not None:
            self.word = nn.Embedding(vocabulary, embed_dim)
            self.position = nn.Embedding(max_len, embed_dim)

    @property
    def parameter_count(self) -> int:
        """Trainable numbers, embeddings included."""
        return parameter_count(self)

    def forward(self, tokens: Tensor, key_mask: Mask = None) -> Tensor:
        """Encode a batch.

        Args:
            tokens: Words, int64 ``[B, N]``, where there is a vocabulary; else ``[B, N, W]``.
            key_mask: bool ``[B, N]``, True = a real token.

        Returns:
            ``[B, N, W]``; padded tokens are zero.
        """
        if self.vocabulary is None:
            check_vectors("x", tokens, self.width)
            check_dtype(tokens, self, self.card.name)
            hidden = tokens
        else:
            hidden = self._embed(tokens)
        if key_mask is not None:
            check_key_mask(hidden, key_mask)
        # What padded tokens hold would reach the weights' gradients through norm and feed-forward.
        hidden = zero_padding(hidden, key_mask)
        for layer in self.layers:
            hidden = layer(hidden, key_mask)
        return zero_padding(self.norm(hidden), key_mask)

    def _embed(self, words: Tensor) -> Tensor:
        is_tensor = isinstance(words, Tensor)
        if not is_tensor or words.dim() != 2 or words.dtype not in WORD_DTYPES:
            seen = f"{words.dtype} {shape_of(words)}" if is_tensor else type(words).__name__
            raise InvalidInputError(
                f"an encoder with a vocabulary takes int64 or int32 [batch, tokens], got {seen}; "
                "build it with vocabulary=None to send token vectors."
            )
        if words.shape[1] > self.max_len:
            raise InvalidInputError(
                f"the encoder was built for max_len={self.max_len} tokens and got "
                f"{words.shape[1]}; build it with a larger max_len."
            )
        places = torch.arange(words.shape[1], device=words.device)
        try:
            return self.word(words) + self.position(places)
        except IndexError as error:
            # Only now, because looking at the words before would make every call wait for the GPU.
            # On a GPU torch stops the program itself, with a device-side assertion.
            raise self._unknown_words(words) from error

    def _unknown_words(self, words: Tensor) -> InvalidInputError:
        last = len(self.word.weight) - 1
        outside = words[(words < 0) | (words > last)]
        return InvalidInputError(
            f"words must be of 0 … {last}, padded ones too, got {outside[0].item()}; build the "
            f"encoder with a larger vocabulary than {last + 1} or send other numbers."
        )


class _Layer(nn.Module):
    """Attention and a feed-forward network, each with a residual and a norm."""

    def __init__(self, attention: nn.Module, width: int, inner: int, norm: str) -> None:
        super().__init__()
        self.attention, self.norm_first = attention, norm == "pre"
        self.feed_forward = nn.Sequential(
            nn.Linear(width, inner), nn.GELU(), nn.Linear(inner, width)
        )
        self.attention_norm, self.feed_forward_norm = nn.LayerNorm(width), nn.LayerNorm(width)

    def forward(self, hidden: Tensor, key_mask: Mask) -> Tensor:
        """``[B, N, W]`` → ``[B, N, W]``."""
        if self.norm_first:
            hidden = hidden + self.attention(self.attention_norm(hidden), key_mask)
            return hidden + self.feed_forward(self.feed_forward_norm(hidden))
        hidden = self.attention_norm(hidden + self.attention(hidden, key_mask))
        return self.feed_forward_norm(hidden + self.feed_forward(hidden))


def masked_mean(hidden: Tensor, key_mask: Mask = None) -> Tensor:
    """Mean over the real tokens, ``[B, N, W]`` → ``[B, W]``; zero where there is none.

    Args:
        hidden: What an `Encoder` returns.
        key_mask: bool ``[B, N]``, True = a real token; None = all are.

    Example:
        >>> masked_mean(torch.tensor([[[1.0], [3.0], [9.0]]]), torch.tensor([[True, True, False]]))
        tensor([[2.]])
    """
    check_vectors("hidden", hidden)
    if key_mask is None:
        return hidden.mean(1)
    check_key_mask(hidden, key_mask)
    return zero_padding(hidden, key_mask).sum(1) / key_mask.sum(1, keepdim=True).clamp_min(1)


@dataclass(frozen=True)
class Parameters:
    """Trainable numbers of an encoder, and how many times softmax's encoder that is."""

    total: int
    relative: float


def compare_parameters(
    names: Iterable[str] | None = None,
    *,
    depth: int,
    embed_dim: int,
    num_heads: int,
    max_len: int,
    feed_forward: int | None = None,
) -> dict[str, Parameters]:
    """Parameters of the host encoder with each system, embeddings left out.

    Args:
        names: Of `lln_lab.peers.available`; None = all.
        depth: See `Encoder`, also for the rest.
        embed_dim: W.
        num_heads: Heads.
        max_len: Counts where a system has weights for every position.
        feed_forward: Inner width.
    """
    sizes = {"depth": depth, "embed_dim": embed_dim, "num_heads": num_heads, "max_len": max_len}
    count = functools.partial(_count, feed_forward=feed_forward, **sizes)
    totals = {name: count(name) for name in (available() if names is None else names)}
    return {name: Parameters(total, total / count("softmax")) for name, total in totals.items()}


@functools.cache
def _count(name: str, **sizes: Any) -> int:
    # Counting needs the shapes alone; drawing the weights would take most of the time.
    with torch.device("meta"):
        return Encoder(name, **sizes).parameter_count

"""RoBERTa-base in plain PyTorch, with any attention: the model of the paper's Table 2.

Built and trained as in fairseq: learned positions, a norm after the embeddings, post-norm layers,
GELU, and a head with tied weights that sees the masked tokens only. Attention weights have no
dropout, because most attentions here never form them; elsewhere dropout is 0.1.

Dimension legend: B batch, N tokens, W width of the model, H heads, D head width, M masked tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import lln
from lln_lab.bench.timing import captured
from lln_lab.peers.host import Host
from lln_lab.peers.nystromformer import Nystromformer

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]

# Tokens in a diagonal block: the head width, as in the paper.
BLOCK = 64


@dataclass(frozen=True)
class RobertaSize:
    """Sizes of the model; the defaults are RoBERTa-base."""

    layers: int = 12
    heads: int = 12
    width: int = 768
    inner: int = 3072
    words: int = 50265
    dropout: float = 0.1


def naive_softmax(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Softmax attention that stores its N×N matrix in memory, ``[B, H, N, D]``."""
    weights = (query @ key.mT * query.shape[-1] ** -0.5).softmax(-1)
    return weights.to(value.dtype) @ value


def nystromformer(size: RobertaSize) -> Attention:
    """Nyströmformer's attention with its own defaults; it has no maximal length."""
    return Nystromformer(Host(embed_dim=size.width, num_heads=size.heads, max_len=512))


# One attention per layer, because some have weights.
SYSTEMS: dict[str, tuple[str, Callable[[RobertaSize], Attention]]] = {
    "softmax_sdpa": ("softmax (SDPA)", lambda _: F.scaled_dot_product_attention),
    "softmax_naive": ("softmax (N×N written)", lambda _: naive_softmax),
    "nystromformer": ("Nyströmformer", nystromformer),
    "lln": ("LLN", lambda _: lln.lln_attention),
    "lln_diag": ("LLN + Diag", lambda _: partial(lln.lln_diag_attention, block_size=BLOCK)),
    "diag": ("Diag alone", lambda _: partial(lln.block_diagonal_attention, block_size=BLOCK)),
}


class Roberta(nn.Module):
    """The encoder and its masked-language head."""

    def __init__(
        self, size: RobertaSize, tokens: int, attention: Callable[[RobertaSize], Attention]
    ) -> None:
        """Build the model with fresh weights.

        Args:
            size: Sizes of the model.
            tokens: Longest sequence, the number of learned positions.
            attention: Makes the attention of one layer.
        """
        super().__init__()
        self.word = nn.Embedding(size.words, size.width)
        self.position = nn.Embedding(tokens, size.width)
        self.norm = nn.LayerNorm(size.width)
        self.dropout = size.dropout
        self.layers = nn.ModuleList(_Layer(size, attention(size)) for _ in range(size.layers))
        self.head = nn.Linear(size.width, size.width)
        self.head_norm = nn.LayerNorm(size.width)
        self.bias = nn.Parameter(torch.zeros(size.words))
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.normal_(module.weight, std=0.02)

    def forward(self, words: Tensor, masked: Tensor) -> Tensor:
        """Logits ``[M, words]``; ``words`` int64 ``[B, N]``, ``masked`` places in B·N ``[M]``."""
        places = torch.arange(words.shape[1], device=words.device)
        hidden = self.norm(self.word(words) + self.position(places))
        hidden = F.dropout(hidden, self.dropout, self.training)
        for layer in self.layers:
            hidden = layer(hidden)
        chosen = hidden.flatten(0, 1).index_select(0, masked)
        chosen = self.head_norm(F.gelu(self.head(chosen)))
        return F.linear(chosen, self.word.weight, self.bias)


class _Layer(nn.Module):
    """Attention and a feed-forward network, each with a residual and a norm after it."""

    def __init__(self, size: RobertaSize, attention: Attention) -> None:
        super().__init__()
        self.heads, self.dropout, self.attention = size.heads, size.dropout, attention
        self.qkv = nn.Linear(size.width, 3 * size.width)
        self.out = nn.Linear(size.width, size.width)
        self.up = nn.Linear(size.width, size.inner)
        self.down = nn.Linear(size.inner, size.width)
        self.attention_norm, self.norm = nn.LayerNorm(size.width), nn.LayerNorm(size.width)

    def forward(self, hidden: Tensor) -> Tensor:
        """``[B, N, W]`` → ``[B, N, W]``."""
        split = self.qkv(hidden).unflatten(-1, (3, self.heads, -1))
        query, key, value = (side.transpose(1, 2) for side in split.unbind(2))
        attended = self.attention(query, key, value).transpose(1, 2).flatten(-2)
        hidden = self.attention_norm(hidden + self._drop(self.out(attended)))
        inner = self.down(F.gelu(self.up(hidden)))
        return self.norm(hidden + self._drop(inner))

    def _drop(self, tensor: Tensor) -> Tensor:
        return F.dropout(tensor, self.dropout, self.training)


class TrainingStep:
    """A model, its optimiser and one fixed batch: everything that a training step needs."""

    def __init__(
        self,
        size: RobertaSize,
        attention: Callable[[RobertaSize], Attention],
        batch: int,
        tokens: int,
        device: str,
        compile_mode: str | None = None,
    ) -> None:
        """Build everything on the device.

        Args:
            size: Of the model.
            attention: Makes the attention of one layer.
            batch: B.
            tokens: N.
            device: ``"cpu"`` or ``"cuda"``.
            compile_mode: ``mode`` of ``torch.compile`` for the model; None = it is not compiled.
        """
        torch.manual_seed(0)
        with torch.device(device):
            self.model = Roberta(size, tokens, attention).train()
            self.words = torch.randint(size.words, (batch, tokens))
            # 15 % of the tokens are masked, a fixed number, so that nothing waits for a count.
            self.masked = torch.randperm(batch * tokens)[: max(1, batch * tokens * 15 // 100)]
        self.targets = self.words.flatten()[self.masked]
        self.optimiser = torch.optim.AdamW(
            self.model.parameters(), lr=5e-4, betas=(0.9, 0.98), eps=1e-6, weight_decay=0.01,
            fused=device == "cuda", capturable=device == "cuda",
        )  # fmt: skip
        self.device = device
        self.run: Callable[..., Tensor] = self.model
        if compile_mode is not None:
            self.run = torch.compile(self.model, mode=compile_mode)

    def step(self) -> Tensor:
        """Forward (on a GPU in bfloat16 by autocast), backward, AdamW; returns the loss."""
        # No bfloat16 on CPUs: many have no such products and take minutes to emulate them.
        if self.run is not self.model:
            # The graphs of the last step may be replayed: nothing of it is needed any more.
            torch.compiler.cudagraph_mark_step_begin()
        with torch.autocast(self.device, torch.bfloat16, enabled=self.device == "cuda"):
            logits = self.run(self.words, self.masked)
        loss = F.cross_entropy(logits.float(), self.targets)
        loss.backward()
        self.optimiser.step()
        self.optimiser.zero_grad(set_to_none=True)
        return loss.detach()

    def captured(self) -> Callable[[], Tensor]:
        """The step as a CUDA graph: a function that replays it, without launches from Python."""
        graph, loss = captured(self.step, warm_ups=3)

        def replay() -> Tensor:
            graph.replay()
            return loss

        return replay

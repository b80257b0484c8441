"""Measuring inside a model: every attention call, as its queries and keys pass.

Dimension legend: B batch, H query heads, Hk key heads, T queries, S keys, D head width.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from dataclasses import replace
from types import TracebackType

import torch
from torch import nn

from lln import checks
from lln.checks.names import check_choice
from lln.errors import InvalidInputError
from lln.instruments import interception
from lln.instruments.entrances import LOOKED_FOR, patches_for
from lln.instruments.interception import Sighting
from lln.instruments.measurements import Measurement, Measurements
from lln.instruments.observed_call import INSTRUMENTS, SeenCall, measure, prepare

DEFAULT_INSTRUMENTS = ("temperature", "entropy", "spectral_gap")


class capture(Measurements):
    """Measure the attention inside a model while it runs, without changing what it computes.

    Sees calls of lln's functions and modules, of ``scaled_dot_product_attention``, of
    ``nn.MultiheadAttention`` and ``nn.TransformerEncoder`` (fast path included) and of everything
    that goes through Hugging Face's attention interface, whatever the implementation. Queries and
    keys are measured as they pass and then released; nothing of size N×N is kept. Attention dropout
    is not part of what is measured. A forward that activation checkpointing runs again inside the
    backward pass is not measured again.

    After the block the object holds the results (`Measurements`): ``table()`` and ``plot()`` show
    the medians of all heads, ``medians(name)`` returns those of one instrument by layer and head,
    ``records`` has the numbers of every call, sample and head, ``to_json()`` writes them, and
    ``problems`` names the layers that could not be measured.

    Args:
        model: Any module; layers are named by their path in it.
        instruments: Names of functions of `lln.instruments`: ``"temperature"``, ``"entropy"``,
            ``"spectral_gap"``, ``"variance"``, ``"log_normality"``, ``"score_variance"``. LLN
            layers report their ``alpha``, ``beta`` and ``offset`` as well.
        max_calls: Calls per layer to measure; later ones are not measured. None = all.
        on_call: Called with a `SeenCall` after each call is measured.
        one_forward: Whether to stop watching as soon as the model's own forward has ended once.

    Raises:
        InvalidInputError: If the model cannot be watched; at the end of the block, if no attention
            was seen.

    Example:
        >>> layer = nn.MultiheadAttention(16, 2, batch_first=True)
        >>> x = torch.randn(1, 8, 16)
        >>> with capture(layer, instruments=("entropy",)) as seen:
        ...     _ = layer(x, x, x)
        >>> [(record.head, sorted(record.values)) for record in seen.records]
        [(0, ['entropy']), (1, ['entropy'])]
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        instruments: Iterable[str] = DEFAULT_INSTRUMENTS,
        max_calls: int | None = None,
        on_call: Callable[[SeenCall], object] | None = None,
        one_forward: bool = False,
    ) -> None:
        """Check the arguments; nothing is watched before the block begins."""
        super().__init__()
        if not isinstance(model, nn.Module):
            raise InvalidInputError(
                f"capture needs a torch.nn.Module, got {type(model).__name__}; for queries and "
                "keys you already have, call the instruments themselves."
            )
        if not isinstance(instruments, Iterable):
            raise InvalidInputError(
                f"instruments must be names such as 'entropy', got {type(instruments).__name__}."
            )
        self.instruments = (instruments,) if isinstance(instruments, str) else tuple(instruments)
        for name in self.instruments:
            check_choice("instruments", name, INSTRUMENTS)
        if max_calls is not None:
            checks.check_count("max_calls", max_calls)
        self.model, self.max_calls, self.on_call = model, max_calls, on_call
        self.one_forward = one_forward
        self.names = {id(module): name for name, module in model.named_modules()}
        self._counts: dict[tuple[str, str], int] = {}
        self._patches: list[interception.Patch] | None = None
        self._lock = threading.Lock()

    def __enter__(self) -> capture:
        """Begin to watch."""
        if self._patches is not None:
            raise InvalidInputError("this capture is already running; make a new one to nest it.")
        _refuse_compiled(self.model)
        patches = patches_for(self.model)
        interception.start(self, patches)
        self._patches = patches
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Put everything back, and say so if nothing was seen."""
        self.stop()
        if error is None and not self.calls:
            raise InvalidInputError(
                f"capture saw no attention in {type(self.model).__name__}: inside the block its "
                f"forward must run and call one of {'; '.join(LOOKED_FOR)}. Attention written out "
                "by hand, or run by another compiled graph, cannot be seen; measure its queries "
                "and keys with the functions of lln.instruments."
            )

    def stop(self) -> None:
        """Stop watching and put everything back; leaving the block does it too."""
        with self._lock:
            patches, self._patches = self._patches, None
        if patches is not None:
            interception.stop(self, patches)

    def forward_ended(self, module: nn.Module) -> None:
        """Stop, if this was the forward to wait for."""
        if self.one_forward and module is self.model:
            self.stop()

    def hear(self, layer: str, module: nn.Module, sighting: Sighting) -> None:
        """Take one call; called from the model's forward, in its thread."""
        place = (layer, sighting.call.kind)
        with self._lock:
            number = self._counts.get(place, 0)
            self._counts[place] = number + 1
        if self.max_calls is not None and number >= self.max_calls:
            return
        seen = prepare(layer, number, sighting)
        values, problem = measure(seen, self.instruments)
        # `lln.nn.heads.LLNDiagCore` may give blocks the last heads only.
        first_head = getattr(module, "first_block_head", 0) if seen.kind == "diag" else 0
        numbers = {name: tensor for name, tensor in values.items() if tensor.dim() == 2}
        measured = Measurement(layer, number, seen.kind, *seen.tokens, first_head, numbers, problem)
        with self._lock:
            self.calls.append(measured)
        if self.on_call is not None:
            self.on_call(replace(seen, values=values, problem=problem))


def _refuse_compiled(model: nn.Module) -> None:
    """Refuse a model with a compiled part, which hides its attention, and name that part."""
    for name, module in model.named_modules():
        where = f"its part {name!r}" if name else "the model"
        if isinstance(module, torch.jit.ScriptModule):
            raise InvalidInputError(
                f"capture cannot see inside TorchScript, which {where} is; capture the module it "
                "was made from."
            )
        compiled = getattr(module, "_compiled_call_impl", None) is not None
        # The class lives in a part of torch that only compiling loads.
        if compiled or type(module).__name__ == "OptimizedModule":
            raise InvalidInputError(
                f"capture cannot see inside torch.compile, by which {where} is compiled; capture "
                "the original module (model._orig_mod, or the model before model.compile())."
            )

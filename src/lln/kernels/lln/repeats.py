"""Calls like one that ran before: from tensors straight to the launches.

Planning a call, preparing its arguments and finding its recipe takes longer than a short call's
kernels. All of it depends on shapes, strides, types and options alone. So the first call of a kind
leaves a `Repeat`: later ones allocate what they return, fill in addresses and launch. Whatever is
unusual (a compiler, a transform, an observer, packed sequences, dropout, temperatures or a mix that
learn) has no kind, and takes the long way.

Python itself is then most of what a short call costs. Where the user has built the compiled
launcher (`compiled_launcher`), a `Repeat` is registered with it: `try_fast_path` launches such
calls, forward and backward, and gives back None where it cannot. Then everything is as without it.

Dimension legend: B batch, H query heads, SH summary heads, T queries, S keys, D head width,
E value width. What is ``prepared`` is a
`lln.functional.way.Prepared`; this layer lies below it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lln.checks.call import Call
from lln.kernels.launching import compiled_launcher, plain_launches
from lln.kernels.launching.operators import launched
from lln.kernels.launching.shapes import layout_of, output_like, summary_heads, within_reach
from lln.kernels.launching.sizes import overrides
from lln.kernels.lln import lln_ops
from lln.kernels.moments import moment_ops
from lln.tracing import is_watched

if TYPE_CHECKING:
    from lln.kernels.launching.recipes import Recipe
    from lln.kernels.summaries.lln_call import Gradients, LLNCall

# The compiled launcher's ``attend`` once it is loaded. It takes a call, whether groups of query
# heads are allowed, and how to run it.
try_fast_path: Callable[[Call, bool, str], Tensor | None] | None = None


def register_native(repeat: Repeat, call: Call, impl: str) -> None:
    """Let the compiled launcher take later calls like this one, if there is one."""
    global try_fast_path
    launcher = compiled_launcher.load(differentiate_by_the_long_way)
    if launcher is None:
        return
    try_fast_path = launcher.attend
    shared = repeat.compiled(launcher)
    if shared is not None:
        # Groups of query heads are allowed: the call has been checked.
        launcher.learn(call, True, impl, (repeat, *shared))


def differentiate_by_the_long_way(
    repeat: Repeat, gradient: Tensor, tensors: Sequence[Any], numbers: Sequence[Any], kept: Any
) -> tuple[Tensor, Tensor, Tensor, Any]:
    """A backward pass that the compiled launcher leaves to Python.

    It gets query, key, value, α, β and the mask, α, β and mix as numbers, and log-mass and
    centroid, or None twice.

    Returns:
        Gradients of query, key and value, and the launches of later passes like this one in the
        compiled launcher's form; None where there are none.
    """
    inputs = (*tensors, None, None, *repeat.numbers(*numbers))
    made = repeat.gradients([gradient], inputs, kept, (False, False, False))
    launches = repeat.backwards.get(_layouts(gradient, tensors))
    launcher = compiled_launcher.loaded()
    compiled = _native(launches, launcher) if launches and launcher is not None else None
    return made[0], made[1], made[2], compiled


class Repeat:
    """How to launch calls of one kind."""

    def __init__(
        self, call: LLNCall, matching: Recipe | None, forward: Recipe, tracked: bool
    ) -> None:
        """Take over what the calls share.

        ``call`` is one of them, of whose tensors none is kept; then the launches that find α and β
        (None where they are given), those of the forward pass, and whether a backward pass follows.
        """
        query, value = call.query, call.value
        self.device, self.index = query.device, query.device.index
        self.matching, self.forward, self.tracked = matching, forward, tracked
        self.width, self.causal = value.shape[3], call.causal
        self.scale, self.block_size = call.scale, call.block_size
        self.heads = (call.samples, query.shape[1], 1, 1)
        slots = (call.samples, call.summary_heads, query.shape[3])
        keeps = tracked and not call.causal
        self.kept = (slots, (*slots, self.width), value.dtype) if keeps else None
        # By how the gradient of the output and the saved tensors lie in memory.
        self.backwards: dict[Hashable, Any] = {}
        # Either way saves the same tensors: when checkpointing repeats a forward, it may be the
        # other one.
        self.operation = lln_ops.ORDINARY._replace(
            launch=lambda *inputs: self.launch_forward(*_parted(inputs)),
            differentiate=self.gradients,
        )

    def compiled(self, launcher: Any) -> tuple[Any, ...] | None:
        """What the calls share, in the compiled launcher's form; None where it cannot launch."""
        forward = _native(self.forward, launcher)
        matching = None if self.matching is None else _native(self.matching, launcher)
        if forward is None or (matching is None) != (self.matching is None):
            return None
        slots = 0 if self.kept is None else self.kept[0][1]
        return matching, forward, self.kept is not None, slots

    def numbers(self, alpha: float, beta: float, mix: float) -> tuple[Any, ...]:
        """The numbers of an `LLNCall` of this kind; α and β where they are no tensors."""
        return alpha, beta, mix, self.block_size, self.scale, 0.0, 0, self.causal, 0

    def is_free(self) -> bool:
        """Whether launches go to the current device, and no profiler listens to them."""
        from lln.kernels.launching import recipes

        watched = recipes.launches_are_watched() or overrides
        return not watched and torch.cuda.current_device() == self.index

    def run(self, call: Call) -> Tensor:
        """A call of this kind."""
        query, key, value, alpha, beta = *call.qkv, call.alpha, call.beta
        mask = call.key_mask
        if self.matching is not None:
            results = torch.empty((5, *self.heads), dtype=torch.float32, device=self.device)
            addresses = _addresses((query, key, value, None, None, mask), (1.0, 1.0, 1.0))
            _launch(self.matching, addresses | {"p_results": results.data_ptr()}, self.device)
            alpha, beta = results[0], results[1]
        alpha, alpha_number = (alpha, 1.0) if isinstance(alpha, Tensor) else (None, float(alpha))
        beta, beta_number = (beta, 1.0) if isinstance(beta, Tensor) else (None, float(beta))
        numbers = self.numbers(alpha_number, beta_number, float(call.mix))
        tensors = (query, key, value, alpha, beta, mask, None, None)
        if self.tracked:
            return launched(self.operation, *tensors, *numbers)
        return self.launch_forward(tensors, numbers)[0]

    def launch_forward(
        self, tensors: Sequence[Any], numbers: Sequence[Any]
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Output, and for a backward pass the summary: as `attend_bidirectional`."""
        query = tensors[0]
        out = output_like(query, self.width)
        log_mass = centroid = None
        if self.kept is not None:
            shape, wide, dtype = self.kept
            log_mass = torch.empty(shape, dtype=torch.float32, device=self.device)
            centroid = torch.empty(wide, dtype=dtype, device=self.device)
        addresses = _addresses(tensors, numbers, log_mass, centroid)
        addresses["p_m"] = addresses["p_o"] = out.data_ptr()
        _launch(self.forward, addresses, self.device)
        return out, log_mass, centroid

    def gradients(
        self, found: Sequence[Tensor], inputs: Sequence[Any], kept: Sequence[Any], asked: Any
    ) -> Gradients:
        """As those of `lln.kernels.lln.lln_ops.ORDINARY`."""
        (gradient,), (tensors, numbers) = found, _parted(inputs)
        made = self.differentiate(gradient, tensors, numbers, kept)
        if made is not None:
            return *made, None, None, None
        log_mass, centroid = kept
        wanted = lln_ops.gradients(gradient, tuple(inputs), log_mass, centroid, tuple(asked))
        self.learn(gradient, tensors, numbers)
        return wanted

    def differentiate(
        self, gradient: Tensor, tensors: Sequence[Any], numbers: Sequence[Any], kept: Sequence[Any]
    ) -> tuple[Tensor, Tensor, Tensor] | None:
        """Gradients of query, key and value; None where the long way has to be taken."""
        launches = self.backwards.get(_layouts(gradient, tensors))
        if not launches or not self.is_free():
            return None
        query, key, value = tensors[:3]
        made = torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)
        addresses = _addresses(tensors, numbers, *kept)
        addresses |= dict.fromkeys(_OF_GRADIENT, gradient.data_ptr())
        for name, side in zip(("p_dq", "p_dk", "p_dv"), made, strict=True):
            addresses[name] = side.data_ptr()
        _launch(launches, addresses, self.device)
        return made

    def learn(self, gradient: Tensor, tensors: Sequence[Any], numbers: Sequence[Any]) -> None:
        """Prepare later backward passes with gradients like this one, after the long way."""
        layouts = _layouts(gradient, tensors)
        if layouts in self.backwards:
            return
        from lln.kernels.summaries.lln_call import LLNCall, backward_kind

        kind = backward_kind(LLNCall(*tensors, *numbers), gradient)
        within = within_reach(gradient) is gradient
        self.backwards[layouts] = (_recipe_of(kind) if within else None) or False


def _parted(inputs: Sequence[Any]) -> tuple[Sequence[Any], Sequence[Any]]:
    """The tensors of a call, and its numbers."""
    return inputs[: lln_ops.TENSORS], inputs[lln_ops.TENSORS :]


def _native(recipe: Recipe, launcher: Any) -> Any:
    """The launches in the compiled launcher's form; None where it cannot take them."""
    if recipe.native is None:
        sizes_of = compiled_launcher.sizes_of
        try:
            plain = plain_launches.describe(recipe, launcher.slot_names(), sizes_of)
            recipe.native = False if plain is None else launcher.launches(*plain)
            reason = "does not know the parameters of a kernel"
        except Exception as error:  # A version of Triton that we do not know.
            recipe.native = False
            reason = f"cannot read a kernel ({type(error).__name__}: {error})"
        if recipe.native is False:
            compiled_launcher.refuse(reason)
    return recipe.native or None


def _launch(recipe: Recipe, addresses: dict[str, Any], device: torch.device) -> None:
    """Launch everything on the device's current stream."""
    from lln.kernels.launching.recipes import current_stream

    recipe.repeat(addresses, device, current_stream(device))


def repeat_of(call: Call, prepared: Any) -> Repeat | None:
    """A `Repeat` from the recipes that a call of the same layout has left; None = not possible."""
    if prepared.impl != "triton" or prepared.diagonal not in (None, "joint"):
        return None
    if call.kind not in ("lln", "lln_diag") or call.bounds is not None or call.dropout_p:
        return None
    if not _on_gpu(call.query) or is_watched(call.query) or isinstance(call.mix, Tensor):
        return None
    if any(type(side) not in (Tensor, type(None)) for side in (*call.qkv, call.key_mask)):
        return None
    from lln.kernels.moments import launch_moments
    from lln.kernels.summaries.lln_call import LLNCall, forward_kind

    query, key, value, alpha, beta = *call.qkv, call.alpha, call.beta
    if value.shape[3] > prepared.value_width or min(query.numel(), value.numel()) == 0:
        return None
    if any(within_reach(side) is not side for side in (query, key, value)):
        return None
    mask, heads = call.key_mask, (query.shape[0], query.shape[1], 1, 1)
    if mask is not None and not mask.is_contiguous():
        return None
    matching = None
    if alpha is None:
        if call.matching == "paper":
            return None
        curve = moment_ops.curve_of(query.shape[3], call.matching)
        kind = launch_moments.kind_of(query, key, mask, curve)
        matching = _recipe_of(kind)
        if matching is None:
            return None
        results = torch.empty((5, *heads), dtype=torch.float32, device=query.device)
        alpha, beta = results[0], results[1]
    alphas = alpha if isinstance(alpha, Tensor) else None
    betas = beta if isinstance(beta, Tensor) else None
    for side in (alphas, betas):
        if side is not None and (type(side) is not Tensor or side.requires_grad):
            return None
        flat = side is None or (side.dtype == torch.float32 and side.is_contiguous())
        if not flat or (side is not None and tuple(side.shape) != heads):
            return None
    slots = query.shape[1] if call.is_causal else summary_heads(query, key, betas)
    if slots != key.shape[1]:
        # Gradients of keys and values are summed over a group afterwards.
        return None
    blocks = prepared.block_size if prepared.diagonal == "joint" else 0
    scale = query.shape[3] ** -0.5 if call.scale is None else float(call.scale)
    first = LLNCall(
        query, key, value, alphas, betas, mask, block_size=blocks,
        scale=scale if blocks else 1.0, causal=call.is_causal,
    )  # fmt: skip
    tracked = torch.is_grad_enabled() and any(side.requires_grad for side in (query, key, value))
    forward = _recipe_of(forward_kind(first, tracked))
    return None if forward is None else Repeat(first, matching, forward, tracked)


def _recipe_of(kind: Hashable) -> Recipe | None:
    """A recipe that has run; None if there is none."""
    from lln.kernels.launching import recipes

    return recipes.recipe_of(kind)


# What gets the address of the output's gradient: itself, and what nobody looks at.
_OF_GRADIENT = ("p_g", "p_m", "p_dalpha", "p_dbeta", "p_dmix")


def _addresses(
    tensors: Sequence[Any],
    numbers: Sequence[Any],
    log_mass: Tensor | None = None,
    centroid: Tensor | None = None,
) -> dict[str, Any]:
    """The arguments that all passes share; what is not there is never read."""
    query, key, value, alpha, beta, mask = tensors[:6]
    begin = query.data_ptr()
    return {
        "p_q": begin,
        "p_k": key.data_ptr(),
        "p_v": value.data_ptr(),
        "p_alpha": begin if alpha is None else alpha.data_ptr(),
        "p_beta": begin if beta is None else beta.data_ptr(),
        "p_mask": begin if mask is None else mask.data_ptr(),
        "p_starts": begin,
        "p_log_mass": begin if log_mass is None else log_mass.data_ptr(),
        "p_centroid": begin if centroid is None else centroid.data_ptr(),
        "alpha": numbers[0],
        "beta": numbers[1],
        "mix": numbers[2],
        "seed": 0,
    }


def _layouts(gradient: Tensor, tensors: Sequence[Any]) -> Hashable:
    """What decides a backward pass; hooks may bring saved tensors back with other strides."""
    return tuple([layout_of(side) for side in (gradient, *tensors[:6])])


def _on_gpu(tensor: Tensor) -> bool:
    return tensor.is_cuda

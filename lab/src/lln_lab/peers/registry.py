"""Every attention system by its name: `available`, `card`, `build`."""

from importlib import import_module
from typing import Any

from torch import nn

from lln.checks.names import did_you_mean
from lln.checks.signatures import explain_misfits
from lln.errors import InvalidInputError
from lln_lab.peers.card import Card
from lln_lab.peers.host import Host
from lln_lab.peers.option_checks import keywords_of
from lln_lab.peers.peer import Core, Peer
from lln_lab.peers.projected import Projected

# Family → name → file and class. Imported when asked for, so that a list of names costs nothing.
_SYSTEMS = {
    "softmax and LLN": {
        "softmax": "softmax.Softmax",
        "diag": "block_diagonal.BlockDiagonal",
        "window": "window.Window",
        "pages": "pages.Pages",
        "lln": "lln.LLN",
        "lln_diag": "lln.LLNDiag",
        "lln_keys": "lln.LLNKeys",
    },
    "feature maps": {
        "relu": "relu.Relu",
        "quadratic": "quadratic.Quadratic",
        "elu": "elu.Elu",
        "performer": "performer.Performer",
        "rfa": "rfa.RandomFeatureAttention",
        "cosformer": "cosformer.CosFormer",
        "hedgehog": "hedgehog.Hedgehog",
        "mala": "mala.Mala",
        "polaformer": "polaformer.PolaFormer",
        "nalaformer": "nalaformer.NaLaFormer",
    },
    "low rank": {
        "nystromformer": "nystromformer.Nystromformer",
        "linformer": "linformer.Linformer",
        "skyformer": "skyformer.Skyformer",
        "set_transformer": "set_transformer.SetTransformer",
        "synthesizer": "synthesizer.Synthesizer",
    },
    "windows and patterns": {
        "longformer": "longformer.Longformer",
        "transformer_ls": "transformer_ls.TransformerLS",
        "local_global": "local_global.LocalGlobal",
        "bigbird": "bigbird.BigBird",
        "sparse_transformer": "sparse_transformer.SparseTransformer",
        "blockwise": "blockwise.Blockwise",
        "axial": "axial.Axial",
    },
    "sorting and clustering": {
        "reformer": "reformer.Reformer",
        "sinkhorn": "sinkhorn.Sinkhorn",
        "routing": "routing.Routing",
        "clustered": "clustered.Clustered",
    },
    "decay, convolution, gates": {
        "transnormer_t1": "transnormer.TransNormerT1",
        "transnormer_t2": "transnormer.TransNormerT2",
        "tnn": "tnn.ToeplitzNetwork",
        "flash": "flash.Flash",
        "lion_d": "lion.LionD",
        "lion_s": "lion.LionS",
    },
}
_WHERE = {name: where for family in _SYSTEMS.values() for name, where in family.items()}

# Which systems are of one kind of idea: the order of tables, and the panels of figures.
FAMILIES: dict[str, tuple[str, ...]] = {family: tuple(names) for family, names in _SYSTEMS.items()}

# Systems of the paper's section 2.2 without an encoder form, and why.
_REFUSED = {
    "compressive": "Compressive Transformer is a causal language model's memory (past activations "
    "kept, then compressed): an encoder that sees the whole sequence has nothing to remember"
}


def available() -> tuple[str, ...]:
    """The names `build` knows, family by family."""
    return tuple(_WHERE)


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
    raise InvalidInputError(f"{name!r} is in no family; lln_lab.peers.FAMILIES lists them.")


def find(name: str) -> type[Core] | type[Peer]:
    """The class behind a name.

    Raises:
        InvalidInputError: If there is none, with the names there are.
    """
    if not isinstance(name, str):
        raise InvalidInputError(
            f"the name of an attention must be a string such as 'softmax', got {name!r}."
        )
    if name in _REFUSED:
        raise InvalidInputError(f"{_REFUSED[name]}. See lln_lab.peers.available() for the others.")
    if name not in _WHERE:
        meant = did_you_mean(name, _WHERE)
        others = (
            "lln_lab.peers.available() lists all" if meant else f"there are: {', '.join(_WHERE)}"
        )
        raise InvalidInputError(f"no attention is called {name!r}{meant}; {others}.")
    file, _, class_name = _WHERE[name].partition(".")
    return getattr(import_module(f"lln_lab.peers.{file}"), class_name)


def card(name: str) -> Card:
    """The facts about a system."""
    return find(name).card


@explain_misfits
def build(
    name: str,
    *,
    embed_dim: int,
    num_heads: int,
    max_len: int,
    is_causal: bool = False,
    layer: int = 0,
    layers: int = 1,
    **options: Any,
) -> Peer:
    """Build one layer of an attention system, called as ``module(x, key_mask=None)``.

    Args:
        name: One of `available`.
        embed_dim: Width of the tokens.
        num_heads: Heads.
        max_len: The longest sequence it will see; some systems have weights for every position.
        is_causal: Whether token i sees tokens 0 … i only; refused by systems without a causal form.
        layer: Index of the layer in the host, for systems whose layers differ.
        layers: How many layers the host has.
        **options: The system's own, as its class documents them, and ``compat`` where it knows a
            published code base. Cores also take ``diagonal`` and ``convolution`` (see
            `lln_lab.peers.projected.Projected`).

    Returns:
        A module from ``[B, N, embed_dim]`` to the same.

    Raises:
        InvalidInputError: One sentence on what does not fit.

    Example:
        >>> import torch
        >>> layer = build("elu", embed_dim=16, num_heads=2, max_len=64)
        >>> layer(torch.randn(3, 10, 16)).shape
        torch.Size([3, 10, 16])
    """
    system = find(name)
    host = Host(
        embed_dim=embed_dim,
        num_heads=num_heads,
        max_len=max_len,
        is_causal=is_causal,
        layer=layer,
        layers=layers,
    )
    if is_causal and not system.card.causal:
        causal = [other for other in _WHERE if card(other).causal]
        raise InvalidInputError(f"{name} has no causal form; those with one: {', '.join(causal)}.")
    branches = {}
    if issubclass(system, Core):
        branches = {key: options.pop(key) for key in ("diagonal", "convolution") if key in options}
    _check_options(name, system, options)
    module = system(host, **options)
    return Projected(module, **branches) if isinstance(module, Core) else module


def parameter_count(module: nn.Module) -> int:
    """Trainable numbers in a module."""
    return sum(tensor.numel() for tensor in module.parameters() if tensor.requires_grad)


def _check_options(name: str, system: type[nn.Module], options: dict[str, Any]) -> None:
    parameters = keywords_of(system)
    known = list(parameters)
    if issubclass(system, Core):
        known += ["diagonal", "convolution"]
    for option in options:
        if option not in known:
            takes = f"it takes {', '.join(known)}" if known else "it takes none"
            meant = did_you_mean(option, known)
            raise InvalidInputError(f"{name} has no option {option!r}{meant}; {takes}.")
        is_switch = option in parameters and isinstance(parameters[option].default, bool)
        if is_switch and not isinstance(options[option], bool):
            raise InvalidInputError(f"{option} must be True or False, got {options[option]!r}.")

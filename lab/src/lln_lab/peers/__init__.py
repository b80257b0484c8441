"""Every attention system LLN is compared with, behind one `build`.

One small file per system. They share the rules of padding and precision (`peer`), the attention of
feature maps (`linear`) and small tools (`masked`, `token_blocks`, `projections`), so that a mistake
in one system is not a mistake in all.
"""

from lln_lab.peers.card import Card
from lln_lab.peers.encoder import Encoder, compare_parameters, masked_mean
from lln_lab.peers.host import Host
from lln_lab.peers.options import Option, options_of
from lln_lab.peers.peer import Core, Peer
from lln_lab.peers.registry import (
    FAMILIES,
    available,
    build,
    card,
    family_of,
    find,
    parameter_count,
)

__all__ = [
    "FAMILIES",
    "Card",
    "Core",
    "Encoder",
    "Host",
    "Option",
    "Peer",
    "available",
    "build",
    "card",
    "compare_parameters",
    "family_of",
    "find",
    "masked_mean",
    "options_of",
    "parameter_count",
]

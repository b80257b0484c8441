"""Every attention system LLN is compared with, behind one `build`.

One small file a system. They share the rules of padding and precision (`peer`, `linear`) and
nothing else, so that a mistake in one is not a mistake in all.
"""

from lln.peers.card import Card
from lln.peers.encoder import Encoder, compare_parameters, masked_mean
from lln.peers.families import FAMILIES, family_of
from lln.peers.host import Host
from lln.peers.options import Option, options_of
from lln.peers.peer import Core, Peer
from lln.peers.registry import available, build, card, find, parameter_count

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

"""The exceptions this package raises on purpose."""


class LLNError(Exception):
    """Base class of every error raised on purpose by ``lln``."""


class InvalidInputError(LLNError, ValueError):
    """An argument cannot be used; the message names it, what was seen and what is expected."""


class CausalStatisticsError(InvalidInputError):
    """Causal attention was asked to take α and β from the same sequence that it processes."""


class BackendUnavailableError(LLNError, RuntimeError):
    """The requested ``impl`` cannot run here; the message names the fix."""


class MemoryShortageError(LLNError, MemoryError):
    """A library of ours got no memory from the system; the message says what needs less."""


class PeerError(LLNError, RuntimeError):
    """A collective failed, or another rank refused its arguments; the message names the step."""


class UnsupportedModelError(InvalidInputError):
    """A model's attention cannot be reached, or uses a feature that linear attention lacks."""


class UnexpectedArgumentError(InvalidInputError, TypeError):
    """A call does not fit the signature; the message names the argument to use instead."""


class WriteError(LLNError, OSError):
    """The disk is full or not writable; the message says what the failed write left behind."""


class CalibrationWarning(UserWarning):
    """α and β were measured on too few tokens, or are far outside their usual range."""

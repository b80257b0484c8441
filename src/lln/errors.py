"""The exceptions this package raises on purpose."""


class LLNError(Exception):
    """Base class of every error raised on purpose by ``lln``."""


class InvalidInputError(LLNError, ValueError):
    """An argument cannot be used; the message names it, what was seen and what is expected."""


class CausalStatisticsError(InvalidInputError):
    """Causal attention was asked to take α, β from the very sequence it processes."""


class BackendUnavailableError(LLNError, RuntimeError):
    """The requested ``impl`` cannot run here; the message names the fix."""


class UnsupportedModelError(InvalidInputError):
    """A model keeps its attention to itself, or asks of it what linear attention cannot do."""


class UnexpectedArgumentError(InvalidInputError, TypeError):
    """A call does not fit the signature; the message names the argument to use instead."""


class WriteError(LLNError, OSError):
    """The disk is full or cannot be written; the message says what is left there."""


class CalibrationWarning(UserWarning):
    """α and β were found on few tokens, or lie far from where they usually do."""

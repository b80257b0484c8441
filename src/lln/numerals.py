"""Numbers as people read them."""

from __future__ import annotations


def written(value: float, form: str) -> str:
    """A number in the given form, without a sign before what reads as zero.

    Args:
        value: The number.
        form: As `format` takes it.

    Example:
        >>> written(-0.004, ".2f"), written(-0.004, "+.2f"), written(-0.004, "+.3f")
        ('0.00', '0.00', '-0.004')
    """
    text = format(value, form)
    digits = [each for each in text if each.isdigit()]
    return text.lstrip("+-") if digits and set(digits) == {"0"} else text

"""Which α and β make LLN as concentrated as softmax attention, by formula or by measuring."""

from lln.matching.calibration import calibrate
from lln.matching.moments import match_moments

__all__ = ["calibrate", "match_moments"]

"""The measured sections of the page; each also has its result as a line of plain text."""

from lln.studies.demo.sections.concentration import concentration_headline, concentration_section
from lln.studies.demo.sections.speed import speed_headline, speed_section
from lln.studies.demo.sections.training import training_headline, training_section

__all__ = [
    "concentration_headline",
    "concentration_section",
    "speed_headline",
    "speed_section",
    "training_headline",
    "training_section",
]

"""Write every table and figure of README and docs anew: ``python -m lln_lab.documents``.

Runs at the top of a checkout. Nothing between the marks of a section is written by hand.
"""

from __future__ import annotations

import argparse
from itertools import chain

from lln_lab.documents import benchmark_sections, model_sections, study_sections, way_sections
from lln_lab.markdown import fill

SOURCES = (benchmark_sections, model_sections, study_sections, way_sections)


def main() -> None:
    """Read the results, fill the sections, draw the figures."""
    argparse.ArgumentParser(description=__doc__).parse_args()
    fill(chain.from_iterable(source.sections() for source in SOURCES))
    for source in SOURCES:
        source.draw()


if __name__ == "__main__":
    main()

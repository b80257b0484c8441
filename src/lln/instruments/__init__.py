"""Instruments that see how concentrated attention is: exact, in memory linear in N.

Each takes queries and keys and gives one number per head, ``[B, H]``:

- `temperature`, Eq. (5) and (11)
- `entropy`, Eq. (7)
- `spectral_gap`, section 3.2.2
- `variance` of P, Theorem 3.4
- `log_normality` of P, Propositions 3.1 and 4.1
- `score_variance` and its parts, Eq. (5)

`capture` measures them inside a model while it runs.

`of_matrix` has the same for a row-stochastic matrix you already have.
"""

from lln.instruments import of_matrix
from lln.instruments.capture import capture
from lln.instruments.entropy import entropy
from lln.instruments.log_normality import LogNormality, log_normality
from lln.instruments.score_variance import ScoreVariance, score_variance
from lln.instruments.spectral_gap import spectral_gap
from lln.instruments.temperature import temperature
from lln.instruments.variance import variance

__all__ = [
    "LogNormality",
    "ScoreVariance",
    "capture",
    "entropy",
    "log_normality",
    "of_matrix",
    "score_variance",
    "spectral_gap",
    "temperature",
    "variance",
]

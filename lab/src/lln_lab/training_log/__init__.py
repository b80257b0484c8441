"""The concentration of a model's attention through its training: what is logged, and where.

`ConcentrationLogger` watches a training loop, `lln_lab.training_log.trainer_callback` a Trainer.
"""

from lln_lab.training_log.logger import ConcentrationLogger

__all__ = ["ConcentrationLogger"]

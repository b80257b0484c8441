"""Fits the moment-matching constants from scratch: draw Gaussian inputs, measure, fit."""

from lln_lab.fitting.fit import FitConfig, fit_constants

__all__ = ["FitConfig", "fit_constants"]

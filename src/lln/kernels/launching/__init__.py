"""Launching kernels, whichever: limits of chips, sizes, recipes, and steps that kernels share."""

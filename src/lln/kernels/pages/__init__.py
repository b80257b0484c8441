"""Attention to a window, sinks and chosen pages by Triton."""

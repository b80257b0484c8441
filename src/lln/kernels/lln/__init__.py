"""Whole calls of LLN attention, with or without blocks: launches, operators, slices, repeats."""

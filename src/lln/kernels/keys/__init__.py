"""Attention with exact keys: choosing them and reading them."""

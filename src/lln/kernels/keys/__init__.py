"""Attention with exact keys: choosing them, by groups or by query, and reading them."""

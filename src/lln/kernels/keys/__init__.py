"""Exact keys beside the slots: choosing them, by groups or by query, and attending to them."""

"""Conversion to a target: trials find how few exact keys suffice; ``lln convert --target``."""

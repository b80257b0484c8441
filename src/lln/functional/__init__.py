"""The entry points: dense, packed and decoding, and the plan that each call is run by."""

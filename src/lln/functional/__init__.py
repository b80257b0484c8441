"""The entry points (dense, packed and decoding), and the plan that decides how each call runs."""

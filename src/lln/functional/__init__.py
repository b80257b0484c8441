"""The entry points (dense, packed and decoding), and the list of ways that decides how each call runs."""

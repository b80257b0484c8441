"""Other libraries: the only files that import them."""

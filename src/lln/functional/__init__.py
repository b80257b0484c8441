"""The entry points (dense, packed, decoding), and the list of ways that decides how calls run."""

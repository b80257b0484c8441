"""One token at a time: into the summary, and its queries' answer from it."""

"""The passes of LLN attention: keys into a summary, queries that read one, one token more."""

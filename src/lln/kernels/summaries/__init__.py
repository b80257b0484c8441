"""The passes of LLN attention: keys and values into a summary, queries that read one, one token more."""

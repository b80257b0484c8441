"""Which α and β make LLN as concentrated as softmax attention, by formula or by measuring."""

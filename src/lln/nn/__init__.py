"""The modules: attention over projected heads, drop-ins for ``nn.MultiheadAttention``, α and β."""

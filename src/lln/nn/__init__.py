"""The modules: attention over ready-made heads, drop-ins for ``nn.MultiheadAttention``, α and β."""

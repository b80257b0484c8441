"""Other attentions, for comparison: one small file a system, none borrowing our code."""

"""Recovery training: a converted model learns to do what it did with softmax; ``lln recover``."""

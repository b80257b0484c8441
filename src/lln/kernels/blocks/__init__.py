"""Softmax over near tokens alone, in blocks or in sliding windows, and where blocks begin."""

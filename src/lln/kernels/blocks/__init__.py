"""Block-diagonal attention alone, and where blocks begin."""

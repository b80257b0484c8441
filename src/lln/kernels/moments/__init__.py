"""The statistics of moment matching, and α and β from them."""

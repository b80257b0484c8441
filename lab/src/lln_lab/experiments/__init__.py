"""Results of the paper's experiments, and the program that puts them into the docs."""

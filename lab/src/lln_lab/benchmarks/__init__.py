"""The published results and the program that puts them into README and docs."""

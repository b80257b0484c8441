"""The compiled engine of a CPU: passes in C++, how they are built and opened, and calls by them."""

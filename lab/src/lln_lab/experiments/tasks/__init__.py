"""What models are trained and tested on: generated tasks, and real data from a folder."""

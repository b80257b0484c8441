"""What the HTML pages of the command line are made of; each is one file without scripts."""

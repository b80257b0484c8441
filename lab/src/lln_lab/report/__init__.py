"""Building blocks of the command line's HTML pages; each page is one file without scripts."""

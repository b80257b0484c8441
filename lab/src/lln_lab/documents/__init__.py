"""What programs write into README and docs from the results: ``python -m lln_lab.documents``."""

"""The paper's analysis figures, measured anew and drawn: ``lln figure``.

Every figure has a file with two steps: *measure* gives plain numbers, which are kept as JSON, and
*draw* makes a picture of those numbers and nothing else.
"""

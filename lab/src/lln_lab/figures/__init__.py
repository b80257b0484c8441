"""The paper's analysis figures, measured again and drawn: ``lln figure``.

Every figure has a file with two steps: *measure* returns plain numbers, which are saved as JSON,
and *draw* makes a picture from those numbers alone.
"""

"""Speed and memory, measured on the machine at hand: ``lln bench``.

A case is an operation, a shape, a dtype and a pass. It is compared with a float64 reference first
and timed only if it is right (`gate`), then timed (`timing`) and compared with its rivals
(`compare`). Results are saved after every case, so an interrupted run continues where it stopped.
"""

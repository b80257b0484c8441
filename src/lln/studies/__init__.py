"""The code behind the ``lln`` commands: benchmarks, figures, demo, fits, inspections and pages."""

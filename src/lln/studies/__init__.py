"""What the commands of ``lln`` run: benchmarks, figures, the demo, fits, inspections and pages."""

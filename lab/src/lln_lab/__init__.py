"""The laboratory beside ``lln``: rivals, benchmarks, experiments, demo and reports."""

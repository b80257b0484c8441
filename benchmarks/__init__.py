"""Speed, measured: a registry of cases, a runner that gates on correctness, a report."""

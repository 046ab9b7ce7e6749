"""Benchmarks: ratios within one run, with all that is needed to repeat it."""

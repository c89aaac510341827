"""Benchmarks: every published figure comes from here, through `scripts/bench`, into ``docs/results/``."""

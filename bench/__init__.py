"""Measurements of the engine, each a module to run: `python -m bench.throughput`, and so on."""

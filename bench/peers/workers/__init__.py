"""One small program an engine, run by that engine's own Python: standard library and it alone."""

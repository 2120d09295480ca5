"""The parts of `bench.kv_grid`: which runs it makes, how each is made, and tables of them."""

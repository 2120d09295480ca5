"""The race: other engines, each in an environment of its own, measured beside Taut.

`python -m bench.peers.install` brings them, `python -m bench.race` runs them.
"""

"""One list of cases for each native op: the same inputs prove it right and time it."""

"""What is measured of a model once and kept beside it."""

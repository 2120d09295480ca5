"""Taut: a standalone inference engine for reasoning models."""

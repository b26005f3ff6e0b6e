"""Verdicts on model answers; needs no torch."""

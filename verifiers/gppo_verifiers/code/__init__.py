"""Judges programs: compares what they print or return with what is expected, outside the sandbox they run in."""

"""Judges final answers to mathematics problems: extraction, exact comparison, and sympy where that cannot decide."""

"""What a machine with a GPU can verify and others cannot: `python -m tests.gpu` prints a table of verdicts.

These checks have not run on a GPU yet.
"""

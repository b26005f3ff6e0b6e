"""Runs hostile programs and reports what happened; knows nothing of right or wrong answers."""

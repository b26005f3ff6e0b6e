"""Checkpoint folders on disk: published completely or not at all, and read without trusting them. No torch."""

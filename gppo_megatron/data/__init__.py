"""Prompts in, micro-batches out."""

"""Command-line tools over checkpoint folders."""

"""The mutation gate: seeded faults in the numerics, each of which the fast tests must notice. See docs/mutants.md."""

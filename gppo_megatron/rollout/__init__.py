"""From prompts to judged groups of trajectories."""

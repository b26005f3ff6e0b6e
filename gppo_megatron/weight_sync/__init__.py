"""Carrying the policy's weights to the rollout engines."""

"""Verifiers on a node of their own, over HTTP. The trainer's side is `gppo_verifiers.client`."""

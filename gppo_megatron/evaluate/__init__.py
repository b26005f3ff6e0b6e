"""How good a policy is: during training on held-out problems, and by itself."""

"""The trainer: the loop, the policy with its parameters and gradients, the forward pass, the optimizer, and model files."""

"""The trainer's side: the policy that owns parameters and gradients, its forward pass, its optimizer, and model files."""

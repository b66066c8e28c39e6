"""What tests of polyturn, and of what is built on it, need: tiny tokenizers and models that are made in under a second."""

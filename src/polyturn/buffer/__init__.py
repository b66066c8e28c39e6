"""Between rollout and training: groups that wait to be trained on."""

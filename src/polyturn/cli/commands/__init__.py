"""The commands of `polyturn`: their arguments and help texts. Their work is done by the modules of `cli`."""

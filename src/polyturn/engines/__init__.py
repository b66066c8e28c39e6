"""Engines: token ids in, token ids and logprobs out. All other packages use them through `core.protocols.Engine`."""

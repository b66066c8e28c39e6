"""Engines: token ids in, token ids and logprobs out. Everything above reaches them through `core.protocols.Engine`."""

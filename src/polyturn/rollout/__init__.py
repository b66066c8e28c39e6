"""The multi-turn loop: one episode at a time, many at once, everything per request and nothing per batch."""

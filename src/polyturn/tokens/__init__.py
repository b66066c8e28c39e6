"""Between messages and token ids: the codec, incremental encoding, tool-call parsing, and the check that they agree."""

"""The backend `megatron`: megatron-core splits the layers; entry points lead to `placement.py`."""

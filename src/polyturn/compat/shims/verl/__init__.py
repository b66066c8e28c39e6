"""Stands in for verl in the processes of `polyturn run-as verl`: every module below this one is answered by polyturn."""

from polyturn.compat import install

install("verl")

from polyturn.compat.verl.protocol import DataProto, DataProtoItem  # noqa: E402

__all__ = ["DataProto", "DataProtoItem"]

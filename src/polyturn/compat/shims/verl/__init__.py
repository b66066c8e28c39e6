"""Replaces verl in the processes of `polyturn run-as verl`; polyturn provides all of its submodules."""

from polyturn.compat import install

install("verl")

from polyturn.compat.verl.dataproto import DataProto, DataProtoItem  # noqa: E402

__all__ = ["DataProto", "DataProtoItem"]

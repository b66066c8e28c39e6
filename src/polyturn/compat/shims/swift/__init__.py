"""Replaces ms-swift in the processes of `polyturn run-as swift`; polyturn provides all of its submodules."""

from polyturn.compat import install

install("swift")

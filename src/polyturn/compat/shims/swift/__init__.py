"""Stands in for ms-swift in the processes of `polyturn run-as swift`: polyturn answers for every module below this one."""

from polyturn.compat import install

install("swift")

"""Waiting for a file descriptor."""

from __future__ import annotations

import fcntl
import os
import resource

import pytest

from polyturn.infra.process import is_readable


def test_pipe_is_readable_with_data_or_at_its_end() -> None:
    read, write = os.pipe()
    assert not is_readable(read, timeout_s=-1.0)
    os.write(write, b"x")
    assert is_readable(read, timeout_s=0.0)
    os.read(read, 1)
    os.close(write)
    assert is_readable(read, timeout_s=5.0)
    os.close(read)


def test_descriptor_beyond_1023_works() -> None:
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if 0 <= limit <= 1100:
        pytest.skip(f"this shell allows {limit} open files; `ulimit -n 4096` lets the test run")
    read, write = os.pipe()
    high = fcntl.fcntl(read, fcntl.F_DUPFD, 1050)
    os.write(write, b"x")
    assert high >= 1050 and is_readable(high, timeout_s=0.0)
    for fd in (read, write, high):
        os.close(fd)

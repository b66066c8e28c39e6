"""A program that listens on the loopback address of another network namespace and passes the socket to the caller.

    python -I -S listen.py 4711 user,net        standard input is a Unix socket, over which the listening socket is sent
                           pid, namespaces

It is a separate process because only a process with one thread may enter a user namespace. It runs no code of the sandbox.
"""

import ctypes
import os
import socket
import sys


def main(pid: str, names: str) -> None:
    """Enter the namespaces, listen, and send the socket."""
    libc = ctypes.CDLL(None, use_errno=True)
    for namespace in [os.open(f"/proc/{pid}/ns/{name}", os.O_RDONLY) for name in names.split(",")]:
        if libc.setns(namespace, 0) != 0:
            raise OSError(ctypes.get_errno(), f"setns: {os.strerror(ctypes.get_errno())}")
    listening = socket.create_server(("127.0.0.1", 0), backlog=128)
    socket.send_fds(socket.socket(fileno=0), [b"."], [listening.fileno()])


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except OSError as problem:
        sys.exit(str(problem.strerror or problem))

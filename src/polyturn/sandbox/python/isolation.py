"""The isolation of a sandbox: finds the best one that this machine supports, and makes its command line.

    as root       bubblewrap without a new user namespace; the worker then switches to a user that only this sandbox has,
                  because the kernel limits the number of processes per user
    as a user     bubblewrap in a new user namespace
    no bubblewrap only resource limits: refused unless `allow_unsafe` is set

A sandbox has no network and sees only its own processes. /usr and the interpreter are read-only, /tmp is private. The
environment variables are those in ENVIRONMENT, not the trainer's.
"""

from __future__ import annotations

import enum
import functools
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from polyturn.core.errors import ConfigError, one_line
from polyturn.sandbox.python.limits import SandboxLimits

ENVIRONMENT = {
    "PATH": "/usr/local/bin:/usr/bin:/bin",
    "HOME": "/tmp",
    "LANG": "C.UTF-8",
    "PYTHONDONTWRITEBYTECODE": "1",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
}
_SYSTEM = ("/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")
_FROM_ETC = ("/etc/ld.so.cache", "/etc/alternatives", "/etc/localtime", "/etc/mime.types")
INSTALL = "install bubblewrap (`make system`, or `apt-get install bubblewrap`)"


class Isolation(enum.Enum):
    """The separation of the code from the machine."""

    ROOT = "bubblewrap, with a separate user for each sandbox"
    USER = "bubblewrap, in a user namespace"
    NONE = "resource limits alone"


@functools.cache
def find_isolation() -> tuple[Isolation, str]:
    """Return the best isolation on this machine, and why a better one is not available ("" for the best)."""
    if not sys.platform.startswith("linux"):
        return Isolation.NONE, f"bubblewrap needs Linux, and this is {sys.platform}"
    if shutil.which("bwrap") is None:
        return Isolation.NONE, f"bubblewrap is not installed; {INSTALL}"
    isolation = Isolation.ROOT if os.geteuid() == 0 else Isolation.USER
    command = [*bwrap(isolation, SandboxLimits(), python=sys.executable, filter_fd=None), "/bin/true"]
    try:
        tried = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired) as problem:
        return Isolation.NONE, f"bubblewrap does not work here: {one_line(problem):.200}"
    if tried.returncode == 0:
        return isolation, ""
    return Isolation.NONE, f"bubblewrap does not work here: {tried.stderr.strip()[:200]}"


def require_isolation(*, allow_unsafe: bool) -> Isolation:
    """Return the isolation of this machine.

    Raises:
        ConfigError: there is no isolation, and running without it is not allowed.
    """
    isolation, why = find_isolation()
    if isolation is Isolation.NONE and not allow_unsafe:
        raise ConfigError(
            f"the Python sandbox cannot isolate code here: {why}. Untrusted code is refused; set allow_unsafe: true only "
            "for code that you would run yourself"
        )
    return isolation


def bwrap(isolation: Isolation, limits: SandboxLimits, *, python: str, filter_fd: int | None) -> list[str]:
    """Return bubblewrap's command line, up to the program that it starts."""
    command = [shutil.which("bwrap") or "bwrap", "--die-with-parent", "--new-session", "--clearenv", "--cap-drop", "ALL"]
    command += ["--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try"]
    if isolation is Isolation.ROOT:
        command += ["--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]
    else:
        command += ["--unshare-user", "--uid", "65534", "--gid", "65534"]
    command += ["--hostname", "sandbox", "--ro-bind", "/usr", "/usr"]
    for arguments in system_folders():
        command += arguments
    for file in _FROM_ETC:
        command += ["--ro-bind-try", file, file]
    for folder in interpreter_folders(python):
        for parent in reversed(Path(folder).parents[:-1]):  # they contain only the path to the folder
            command += ["--perms", "0755", "--dir", str(parent)]
        command += ["--ro-bind", folder, folder]
    size = str(limits.disk_mb << 20)
    command += ["--proc", "/proc", "--dev", "/dev", "--perms", "1777", "--size", size, "--tmpfs", "/dev/shm"]
    command += ["--perms", "1777", "--size", size, "--tmpfs", "/tmp", "--remount-ro", "/dev", "--remount-ro", "/"]
    for name, value in ENVIRONMENT.items():
        command += ["--setenv", name, value]
    if filter_fd is not None:
        command += ["--seccomp", str(filter_fd)]
    return [*command, "--chdir", "/tmp"]


def system_folders() -> Iterator[tuple[str, str, str]]:
    """Iterate over bubblewrap's arguments for folders that programs need in addition to /usr, such as /bin and /lib."""
    for folder in map(Path, _SYSTEM):
        if folder.is_symlink():
            yield "--symlink", os.readlink(folder), str(folder)
        elif folder.is_dir():
            yield "--ro-bind", str(folder), str(folder)


@functools.cache
def interpreter_folders(python: str) -> Sequence[str]:
    """Return the folders that an interpreter needs in addition to /usr, including those of its virtual environment.

    Raises:
        ConfigError: the interpreter does not start.
    """
    code = "import sys; print(sys.base_prefix, sys.prefix, sep='\\n')"
    try:
        completed = subprocess.run([python, "-I", "-S", "-c", code], capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError) as problem:
        raise ConfigError(f"python is {python!r}, which does not start as an interpreter: {problem}") from problem
    folders = {*completed.stdout.split("\n"), *_environment(python)} - {""}
    return tuple(sorted(f for f in folders if not Path(f).is_relative_to("/usr")))


def _environment(python: str) -> list[str]:
    folder = Path(python).absolute().parent.parent
    return [str(folder)] if (folder / "pyvenv.cfg").exists() else []


def bare_python() -> str:
    """Return this process's interpreter without its virtual environment, so that only the standard library is visible."""
    path = Path(sys.base_prefix) / "bin" / f"python{sys.version_info.major}.{sys.version_info.minor}"
    return str(path) if path.exists() else sys.executable

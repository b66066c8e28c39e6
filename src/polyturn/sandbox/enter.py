"""A program that runs a command in the namespaces of a live bubblewrap sandbox, with few capabilities.

    python -I -S enter.py 7 /app root ipc,uts,net,pid,mnt "" 1 LANG=C ls -l
                          pid, folder, user, namespaces, files of the control group, number of variables, variables, command

It replaces nsenter and setpriv: a tool that drops capabilities inside would be a file of the sandbox, which the model may
have replaced. So no file of the sandbox runs before the capabilities are dropped. The program imports few modules, because
each command pays for the imports, and none after it has entered, because the model may have replaced the modules there.
"""

import ctypes
import os
import sys

KEPT_CAPABILITIES = frozenset({0, 1, 3, 4, 5, 6, 7, 10})
"""chown, dac_override, fowner, fsetid, kill, setgid, setuid, net_bind_service."""
_SET_NO_NEW_PRIVS, _DROP_FROM_BOUNDING = 38, 24


def main(pid: str, cwd: str, user: str, names: str, paths: str, num_variables: str, *rest: str) -> int:
    """Enter the sandbox and run the command; return its exit status."""
    libc = ctypes.CDLL(None, use_errno=True)
    env = dict(variable.split("=", 1) for variable in rest[: int(num_variables)])
    argv = rest[int(num_variables) :]
    doors = [os.open(path, os.O_WRONLY) for path in paths.split(":") if path]
    last = int(open("/proc/sys/kernel/cap_last_cap").read())  # noqa: SIM115
    for namespace in [os.open(f"/proc/{pid}/ns/{name}", os.O_RDONLY) for name in names.split(",")]:
        if libc.setns(namespace, 0) != 0:
            raise OSError(ctypes.get_errno(), "setns")
        os.close(namespace)
    child = os.fork()  # only a child process is inside the sandbox's process-id namespace
    if child:
        for door in doors:
            os.close(door)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        return code if code >= 0 else 128 - code
    try:
        for door in doors:
            os.write(door, b"0")
            os.close(door)
        os.umask(0o022)
        os.chdir(cwd or "/")
        for capability in range(last + 1):
            if capability not in KEPT_CAPABILITIES and libc.prctl(_DROP_FROM_BOUNDING, capability, 0, 0, 0) != 0:
                raise OSError(ctypes.get_errno(), "prctl")
        uid, gid, home = _user(user)
        if os.getuid() != uid or os.getgid() != gid:
            os.setgroups([])
            os.setresgid(gid, gid, gid)
            os.setresuid(uid, uid, uid)
        elif "user" not in names.split(","):
            os.setgroups([])
        if libc.prctl(_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), "prctl")
        _become(argv, {"HOME": home, **env})
    except (OSError, KeyError, ValueError) as problem:
        os.write(2, f"{argv[0]}: {problem}\n".encode())
    os._exit(126)


def _become(argv: tuple, env: dict) -> None:
    """Replace this process by the program; `os.execvpe` would import a module from the sandbox."""
    folders = [""] if "/" in argv[0] else env.get("PATH", "/usr/bin:/bin").split(":")
    for folder in folders:
        try:
            os.execve(os.path.join(folder, argv[0]), argv, env)
        except (FileNotFoundError, NotADirectoryError):
            continue
    raise FileNotFoundError("there is no such program")


def _user(name: str) -> tuple:
    """Return the user id, group id and home folder of a user of the sandbox."""
    if name in ("root", "0"):
        return 0, 0, "/root"
    try:
        with open("/etc/passwd") as users:
            for line in users:
                fields = line.rstrip("\n").split(":")
                if name in (fields[0], fields[2]):
                    return int(fields[2]), int(fields[3]), fields[5]
    except OSError:
        pass
    if name.isdigit():
        return int(name), int(name), "/"
    raise KeyError(f"there is no user {name}")


if __name__ == "__main__":
    try:
        code = main(*sys.argv[1:])
    except OSError as problem:
        sys.stderr.write(f"the sandbox cannot be entered: {problem}\n")
        code = 125
    sys.exit(code)

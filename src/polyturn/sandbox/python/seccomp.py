"""The system calls that a sandbox refuses to the code in it, as a classic BPF program for the kernel's seccomp filter.

Namespaces alone are not sufficient: a process in them could make further user namespaces (the usual path to kernel bugs),
reach the hypervisor over vsock, which network namespaces do not cover, or trace other processes. Some calls allocate memory
outside of a process's limits (memfd_create, System V and POSIX queues), use resources that all processes of a user share
(asynchronous I/O, inotify), or lock files of the machine (flock, leases). The filter also keeps the code from continuing a
process that was stopped from outside: neither the code may send SIGCONT, nor the kernel on its behalf, for a timer, a file
or the end of a child.

    load the architecture -> not the machine's: kill
    load the number       -> in `_REFUSED` or `_SAME_EVERYWHERE`: EPERM;  clone3: ENOSYS, so that libraries use clone;
                             clone with a new namespace, or with SIGCONT as the signal at its end: EPERM;
                             socket of a family that is not in `_FAMILIES`: EAFNOSUPPORT;
                             prctl with PR_SET_PDEATHSIG, so that no process can outlive its parent: EPERM;
                             fcntl with F_SETSIG, F_SETLEASE or F_NOTIFY: EPERM;  kill and similar calls with SIGCONT: EPERM;
                             setsockopt with SO_SNDBUF or SO_RCVBUF, which would enlarge buffers: EPERM
"""

from __future__ import annotations

import platform
import signal
import socket
import struct

_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _AND, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x54, 0x06
_ALLOW, _KILL, _ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
_EPERM, _ENOSYS, _EAFNOSUPPORT = 1, 38, 97
_NUMBER, _ARCH, _ARGUMENTS = 0, 4, (16, 24, 32)
_NEW_NAMESPACES = 0x7E020000
_SET_DEATH_SIGNAL = 1
_SET_SIGNAL, _SET_LEASE, _NOTIFY = 10, 1024, 1026
_SIGNAL_OF_END = 0xFF
"""Mask of the flags of clone: the signal that the parent gets when the child ends."""
_FAMILIES = (1, 2, 10)
"""AF_UNIX, AF_INET and AF_INET6, which reach nothing outside of the sandbox's empty network."""

# io_uring, pidfd_getfd, open_tree, move_mount, fsopen, fsconfig, fsmount, fspick, mount_setattr, memfd_secret
_SAME_EVERYWHERE = (425, 426, 427, 438, 428, 429, 430, 431, 432, 433, 442, 447)
_CLONE3 = 435
_MACHINES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
"""Machine -> its column in the tables below, and the kernel's number of its architecture."""
_LOOKED_AT = {
    "clone": (56, 220),
    "socket": (41, 198),
    "prctl": (157, 167),
    "fcntl": (72, 25),
    "kill": (62, 129),
    "tkill": (200, 130),
    "tgkill": (234, 131),
    "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240),
    "pidfd_send_signal": (424, 424),
    "setsockopt": (54, 208),
}
_REFUSED_WITH = {
    "prctl": (0, (_SET_DEATH_SIGNAL,)),
    "fcntl": (1, (_SET_SIGNAL, _SET_LEASE, _NOTIFY)),
    "kill": (1, (signal.SIGCONT,)),
    "tkill": (1, (signal.SIGCONT,)),
    "tgkill": (2, (signal.SIGCONT,)),
    "rt_sigqueueinfo": (1, (signal.SIGCONT,)),
    "rt_tgsigqueueinfo": (2, (signal.SIGCONT,)),
    "pidfd_send_signal": (1, (signal.SIGCONT,)),
    "setsockopt": (2, (socket.SO_SNDBUF, socket.SO_RCVBUF)),
}
"""System call -> index of the checked argument, and the refused values."""
_REFUSED = {
    "ptrace": (101, 117),
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "unshare": (272, 97),
    "setns": (308, 268),
    "keyctl": (250, 219),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "kexec_load": (246, 104),
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "delete_module": (176, 106),
    "open_by_handle_at": (304, 265),
    "quotactl": (179, 60),
    "swapon": (167, 224),
    "reboot": (169, 142),
    "acct": (163, 89),
    "syslog": (103, 116),
    "kcmp": (312, 272),
    "settimeofday": (164, 170),
    "memfd_create": (319, 279),
    "shmget": (29, 194),
    "shmat": (30, 196),
    "msgget": (68, 186),
    "semget": (64, 190),
    "mq_open": (240, 180),
    "io_setup": (206, 0),
    "inotify_init": (253, None),
    "inotify_init1": (294, 26),
    "fanotify_init": (300, 262),
    "flock": (73, 32),
    "timer_create": (222, 107),
}
"""System call -> its number on each machine; None if the machine does not have it."""


def filter_program(machine: str | None = None) -> bytes | None:
    """Return the filter for a machine's architecture, by default this one's; None for an unsupported architecture."""
    known = _MACHINES.get(platform.machine() if machine is None else machine)
    if known is None:
        return None
    column, arch = known
    numbers = {name: of[column] for name, of in _LOOKED_AT.items()}
    refused = [number for of in _REFUSED.values() if (number := of[column]) is not None]
    steps = [(_LOAD, 0, 0, _ARCH), (_EQUAL, 1, 0, arch), (_RETURN, 0, 0, _KILL), (_LOAD, 0, 0, _NUMBER)]
    steps += [(_AT_LEAST, 0, 1, 0x40000000), (_RETURN, 0, 0, _ERRNO | _ENOSYS)]
    for number in (*refused, *_SAME_EVERYWHERE):
        steps += [(_EQUAL, 0, 1, number), (_RETURN, 0, 0, _ERRNO | _EPERM)]
    steps += [(_EQUAL, 0, 1, _CLONE3), (_RETURN, 0, 0, _ERRNO | _ENOSYS)]  # a filter cannot read its flags
    steps += [(_EQUAL, 0, 6, numbers["clone"]), (_LOAD, 0, 0, _ARGUMENTS[0]), (_ANY_BIT, 2, 0, _NEW_NAMESPACES)]
    steps += [(_AND, 0, 0, _SIGNAL_OF_END), (_EQUAL, 0, 1, signal.SIGCONT)]
    steps += [(_RETURN, 0, 0, _ERRNO | _EPERM), (_RETURN, 0, 0, _ALLOW)]
    for name, (argument, values) in _REFUSED_WITH.items():
        steps += [(_EQUAL, 0, len(values) + 3, numbers[name]), (_LOAD, 0, 0, _ARGUMENTS[argument])]
        steps += [(_EQUAL, len(values) - at, 0, value) for at, value in enumerate(values)]
        steps += [(_RETURN, 0, 0, _ALLOW), (_RETURN, 0, 0, _ERRNO | _EPERM)]
    steps += [(_EQUAL, 0, 2 + len(_FAMILIES), numbers["socket"]), (_LOAD, 0, 0, _ARGUMENTS[0])]
    steps += [(_EQUAL, len(_FAMILIES) - at, 0, family) for at, family in enumerate(_FAMILIES)]
    steps += [(_RETURN, 0, 0, _ERRNO | _EAFNOSUPPORT), (_RETURN, 0, 0, _ALLOW)]
    return b"".join(struct.pack("=HBBI", *step) for step in steps)

"""The system calls that code in a sandbox is refused, as a classic BPF program for the kernel's seccomp filter.

Namespaces do not stand alone: a process in them could make further user namespaces (the usual way to kernel bugs), speak
to the machine's hypervisor over vsock, which no network namespace covers, or trace its neighbours. Some calls give memory
that no limit of a process counts (memfd_create, System V and POSIX queues), take from what all processes of a user share
(asynchronous I/O, inotify), or lock files of the machine (flock, leases).

    load the architecture -> another one: kill
    load the number       -> on the list: EPERM;  clone with a new namespace: EPERM;  socket of another family: EAFNOSUPPORT;
                             prctl that forgets what ends it with its parent: EPERM;  fcntl with a lease or a notice: EPERM
"""

from __future__ import annotations

import platform
import struct

_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _KILL, _ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
_EPERM, _ENOSYS, _EAFNOSUPPORT = 1, 38, 97
_NUMBER, _ARCH, _FIRST_ARGUMENT = 0, 4, 16
_NEW_NAMESPACES = 0x7E020000
_SET_DEATH_SIGNAL = 1
_SECOND_ARGUMENT = 24
_SET_LEASE, _NOTIFY = 1024, 1026
_FAMILIES = (1, 2, 10)
"""AF_UNIX, AF_INET and AF_INET6: an empty network of its own."""

# io_uring, pidfd_getfd, open_tree, move_mount, fsopen, fsconfig, fsmount, fspick, mount_setattr, memfd_secret
_SAME_EVERYWHERE = (425, 426, 427, 438, 428, 429, 430, 431, 432, 433, 442, 447)
_CLONE3 = 435
# ptrace, mount, umount2, pivot_root, chroot, unshare, setns, keyctl, add_key, request_key, bpf, perf_event_open,
# userfaultfd, process_vm_readv, process_vm_writev, kexec_load, init_module, finit_module, delete_module, open_by_handle_at,
# quotactl, swapon, reboot, acct, syslog, kcmp, settimeofday; memfd_create, shmget, shmat, msgget, semget, mq_open, io_setup,
# inotify_init (where there is one), inotify_init1, fanotify_init, flock
_MACHINES = {
    "x86_64": (
        0xC000003E,
        {"clone": 56, "socket": 41, "prctl": 157, "fcntl": 72},
        (
            101,
            165,
            166,
            155,
            161,
            272,
            308,
            250,
            248,
            249,
            321,
            298,
            323,
            310,
            311,
            246,
            175,
            313,
            176,
            304,
            179,
            167,
            169,
            163,
            103,
            312,
            164,
            319,
            29,
            30,
            68,
            64,
            240,
            206,
            253,
            294,
            300,
            73,
        ),
    ),
    "aarch64": (
        0xC00000B7,
        {"clone": 220, "socket": 198, "prctl": 167, "fcntl": 25},
        (
            117,
            40,
            39,
            41,
            51,
            97,
            268,
            219,
            217,
            218,
            280,
            241,
            282,
            270,
            271,
            104,
            105,
            273,
            106,
            265,
            60,
            224,
            142,
            89,
            116,
            272,
            170,
            279,
            194,
            196,
            186,
            190,
            180,
            0,
            26,
            262,
            32,
        ),
    ),
}


def filter_program(machine: str | None = None) -> bytes | None:
    """Return the filter of this machine's architecture; None where none is known."""
    known = _MACHINES.get(platform.machine() if machine is None else machine)
    if known is None:
        return None
    arch, numbers, refused = known
    steps = [(_LOAD, 0, 0, _ARCH), (_EQUAL, 1, 0, arch), (_RETURN, 0, 0, _KILL), (_LOAD, 0, 0, _NUMBER)]
    steps += [(_AT_LEAST, 0, 1, 0x40000000), (_RETURN, 0, 0, _ERRNO | _ENOSYS)]
    for number in (*refused, *_SAME_EVERYWHERE):
        steps += [(_EQUAL, 0, 1, number), (_RETURN, 0, 0, _ERRNO | _EPERM)]
    steps += [(_EQUAL, 0, 1, _CLONE3), (_RETURN, 0, 0, _ERRNO | _ENOSYS)]  # its flags are out of a filter's sight
    steps += [(_EQUAL, 0, 4, numbers["clone"]), (_LOAD, 0, 0, _FIRST_ARGUMENT), (_ANY_BIT, 0, 1, _NEW_NAMESPACES)]
    steps += [(_RETURN, 0, 0, _ERRNO | _EPERM), (_RETURN, 0, 0, _ALLOW)]
    steps += [(_EQUAL, 0, 4, numbers["prctl"]), (_LOAD, 0, 0, _FIRST_ARGUMENT), (_EQUAL, 0, 1, _SET_DEATH_SIGNAL)]
    steps += [(_RETURN, 0, 0, _ERRNO | _EPERM), (_RETURN, 0, 0, _ALLOW)]
    steps += [(_EQUAL, 0, 5, numbers["fcntl"]), (_LOAD, 0, 0, _SECOND_ARGUMENT)]
    steps += [(_EQUAL, 1, 0, _SET_LEASE), (_EQUAL, 0, 1, _NOTIFY)]
    steps += [(_RETURN, 0, 0, _ERRNO | _EPERM), (_RETURN, 0, 0, _ALLOW)]
    steps += [(_EQUAL, 0, 2 + len(_FAMILIES), numbers["socket"]), (_LOAD, 0, 0, _FIRST_ARGUMENT)]
    steps += [(_EQUAL, len(_FAMILIES) - at, 0, family) for at, family in enumerate(_FAMILIES)]
    steps += [(_RETURN, 0, 0, _ERRNO | _EAFNOSUPPORT), (_RETURN, 0, 0, _ALLOW)]
    return b"".join(struct.pack("=HBBI", *step) for step in steps)

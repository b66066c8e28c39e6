"""Tries to leave the Python sandbox, or to overload the machine from inside, in 49 ways; measures how fast a sandbox starts.

Each attempt is code, followed by checks from outside: the attempt must not have printed ESCAPED, must end in time, must leave no
process behind, and the next run in the same process must work. Prints one JSON line:

    {"attempts": 49, "escapes": 0, "left_processes": 0, "first_call_p50_ms": 3.1, …}

    python benchmarks/sandbox_escapes.py [--only NAME …] [--no-speed]
"""

# ruff: noqa: E501
from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from polyturn.sandbox.python.interpreter import Interpreter
from polyturn.sandbox.python.isolation import Isolation, bare_python, find_isolation
from polyturn.sandbox.python.limits import RunResult, SandboxLimits
from polyturn.sandbox.python.pool import WarmPool

LIMITS = SandboxLimits(timeout_s=2.0, memory_mb=192, processes=24, disk_mb=16, output_bytes=20_000, flood_bytes=4 << 20)
SECRET = "POLYTURN_SECRET_4711"
SLACK_S = 6.0

READ = """
for path in {paths!r}:
    try:
        if open(path, "rb").read(1):
            print("ESCAPED", path)
    except OSError:
        pass
"""
WRITE = """
import os
for path in {paths!r}:
    try:
        with open(path, "a") as f:
            f.write("x")
        print("ESCAPED", path)
    except OSError:
        pass
"""
CALL = """
import ctypes, os, platform
libc = ctypes.CDLL(None, use_errno=True)
x86 = platform.machine() == "x86_64"
def call(name, *args):
    r = libc.syscall({{"ptrace": 101 if x86 else 117, "unshare": 272 if x86 else 97, "mount": 165 if x86 else 40,
        "setns": 308 if x86 else 268, "bpf": 321 if x86 else 280, "keyctl": 250 if x86 else 219, "chroot": 161 if x86 else 51,
        "perf": 298 if x86 else 241, "uring": 425, "vm_readv": 310 if x86 else 270, "open_by_handle": 304 if x86 else 265,
        "clone": 56 if x86 else 220, "clone3": 435, "reboot": 169 if x86 else 142, "settime": 164 if x86 else 170,
        "memfd": 319 if x86 else 279, "shmget": 29 if x86 else 194, "msgget": 68 if x86 else 186, "semget": 64 if x86 else 190,
        "mq_open": 240 if x86 else 180, "io_setup": 206 if x86 else 0, "inotify": 294 if x86 else 26, "fanotify": 300 if x86 else 262,
        "flock": 73 if x86 else 32, "fcntl": 72 if x86 else 25, "timer_create": 222 if x86 else 107, "kill": 62 if x86 else 129,
        "tkill": 200 if x86 else 130, "tgkill": 234 if x86 else 131, "queue": 129 if x86 else 138, "pidfd_signal": 424, "setsockopt": 54 if x86 else 208}}[name], *args)
    if r >= 0:
        print("ESCAPED", name, r)
{body}
"""


def attempts(outside: Path) -> dict[str, str]:
    """Return the attempts by name; `outside` is a folder of the machine that must not change."""
    repository = Path(__file__).resolve().parents[1]
    home, me = Path.home(), os.getpid()
    hosts_files = [
        str(repository / "pyproject.toml"),
        str(home / ".bashrc"),
        str(home / ".profile"),
        str(outside / "secret"),
    ]
    connect = "import socket\nsocket.setdefaulttimeout(1)\ns = socket.socket()\n"
    return {
        "fork_bomb": "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass",
        "thread_bomb": "import threading, time\nwhile True:\n    threading.Thread(target=time.sleep, args=(99,)).start()",
        "memory_bomb": "x = []\nwhile True: x.append(bytearray(10_000_000))",
        "memory_bomb_of_many": "import os\nfor _ in range(12):\n    if os.fork() == 0: break\nx = bytearray(150_000_000)\n"
        "import time; time.sleep(99)",
        "one_huge_object": "b'x' * (1 << 40)",
        "huge_integer": "x = 7 ** 7 ** 9",
        "zip_bomb": "import zlib\nd = zlib.compress(bytes(100_000_000))\nx = [zlib.decompress(d) for _ in range(99)]",
        "infinite_output": "while True: print('x' * 1000)",
        "infinite_stderr": "import os\nwhile True: os.write(2, b'y' * 65536)",
        "one_huge_line": "print('z' * 50_000_000)",
        "fill_the_disk": "with open('/tmp/a', 'wb') as f:\n    while True: f.write(bytes(1 << 20))",
        "many_files_on_disk": "for i in range(99):\n    open(f'/tmp/{i}', 'wb').write(bytes(1 << 20))",
        "shared_memory_flood": "with open('/dev/shm/a', 'wb') as f:\n    while True: f.write(bytes(1 << 20))",
        "sleep_for_ever": "import time\ntime.sleep(10 ** 6)",
        "loop_for_ever": "while True: pass",
        "swallow_the_timeout": "import time\nwhile True:\n    try: time.sleep(99)\n    except BaseException: pass",
        "ignore_the_alarm": "import signal\nfor s in range(1, 64):\n    try: signal.signal(s, signal.SIG_IGN)\n"
        "    except (OSError, ValueError): pass\nwhile True: pass",
        "deep_recursion": "import sys\nsys.setrecursionlimit(10 ** 9)\ndef f(): f()\nf()",
        "crash_the_interpreter": "import ctypes\nctypes.string_at(0)",
        "network_out": connect + "try:\n    s.connect(('1.1.1.1', 53)); print('ESCAPED')\nexcept OSError: pass",
        "network_to_the_host": connect + f"try:\n    s.connect(('127.0.0.1', {_port(outside)})); print('ESCAPED')\n"
        "except OSError: pass",
        "network_by_name": "import socket\ntry:\n    socket.getaddrinfo('example.com', 80); print('ESCAPED')\nexcept OSError: pass",
        "vsock_and_netlink": "import socket\nfor f in (40, 16, 17, 38):\n    try:\n        socket.socket(f, socket.SOCK_STREAM if "
        "f == 40 else socket.SOCK_RAW); print('ESCAPED', f)\n    except OSError: pass",
        "abstract_unix_socket": "import socket\ns = socket.socket(socket.AF_UNIX)\ntry:\n"
        f"    s.connect('\\0polyturn-{me}'); print('ESCAPED')\nexcept OSError: pass",
        "read_shadow": READ.format(paths=["/etc/shadow", "/etc/passwd", "/etc/hostname", "/root/.ssh/id_rsa"]),
        "read_home_and_repository": READ.format(paths=hosts_files),
        "secrets_in_the_environment": "import os, glob\nfor p in ['/proc/self/environ', *glob.glob('/proc/*/environ')]:\n"
        f"    try:\n        if b'{SECRET}' in open(p, 'rb').read(): print('ESCAPED', p)\n    except OSError: pass\n"
        f"if '{SECRET}' in str(dict(os.environ)): print('ESCAPED')",
        "read_devices": READ.format(
            paths=["/dev/vda", "/dev/sda", "/dev/mem", "/dev/kmsg", "/proc/kcore", "/proc/kallsyms0"]
        ),
        "write_outside": WRITE.format(paths=[str(outside / "planted"), "/usr/bin/planted", "/planted", "/etc/planted"])
        + "try:\n    os.mkdir('/planted'); print('ESCAPED')\nexcept OSError: pass",
        "write_the_interpreter": "import os\n" + WRITE.format(paths=[os.__file__, sys.executable, bare_python()]),
        "proc_switches": WRITE.format(
            paths=[
                "/proc/sys/kernel/core_pattern",
                "/proc/sysrq-trigger",
                "/proc/sys/vm/drop_caches",
                "/proc/1/oom_score_adj",
            ]
        ).replace('f.write("x")', 'f.write("-1")'),
        "free_the_first_process": "import os\ntry:\n    os.open('/proc/1/mem', os.O_RDWR)\nexcept OSError:\n    pass\nelse:\n"
        "    mine = set(open('/proc/self/limits').read().splitlines())\n    for line in open('/proc/1/limits').read().splitlines():\n"
        "        if line.startswith(('Max cpu', 'Max address', 'Max proc', 'Max file size')) and line not in mine:\n"
        "            print('ESCAPED', line)",
        "outlive_the_trainer": "import ctypes\nif ctypes.CDLL(None).prctl(1, 0, 0, 0, 0) == 0: print('ESCAPED')",
        "root_of_another": "import os, glob\nfor p in glob.glob('/proc/*/root') + glob.glob('/proc/*/cwd'):\n    try:\n"
        f"        if os.path.exists(p + '{outside}/secret'): print('ESCAPED', p)\n    except OSError: pass",
        "symlinks": f"import os\nos.symlink('{outside}/secret', '/tmp/l')\nos.symlink('/proc/1/root', '/tmp/r')\ntry:\n"
        f"    open('/tmp/l').read(); print('ESCAPED')\nexcept OSError: pass\ntry:\n    open('/tmp/r{outside}/secret').read();"
        " print('ESCAPED')\nexcept OSError: pass",
        "dot_dot": f"import os\nfor n in range(12):\n    if os.path.exists('../' * n + '{str(outside)[1:]}/secret'): print('ESCAPED')",
        "signal_the_parent": f"import os, signal\nfor p in ({me}, os.getppid(), {os.getppid()}):\n    try:\n"
        f"        if p > 1: os.kill(p, 9); print('ESCAPED')\n    except OSError: pass",
        "signal_everyone": "import os, signal\nsignal.signal(15, signal.SIG_IGN)\nos.kill(-1, 15)",
        "system_calls": CALL.format(
            body="call('ptrace', 16, 1, 0, 0)\ncall('unshare', 0x10000000)\ncall('mount', 0, b'/tmp', b'tmpfs', 0, 0)\n"
            "call('setns', 0, 0)\ncall('bpf', 0, 0, 0)\ncall('keyctl', 0, -3, 1)\ncall('chroot', b'/tmp')\n"
            "call('perf', 0, 0, -1, -1, 0)\ncall('uring', 1, 0)\ncall('open_by_handle', -100, 0, 0)\n"
            "call('clone', 0x10000011, 0, 0, 0, 0)\ncall('clone3', 0, 0)\ncall('reboot', 0, 0, 0, 0)\n"
            "call('settime', 0, 0)\ncall('vm_readv', 1, 0, 0, 0, 0, 0)"
        ),
        "memory_that_no_limit_counts": CALL.format(
            body="call('memfd', b'a', 0)\ncall('shmget', 0, 1 << 24, 0o1600)\ncall('msgget', 0, 0o1600)\n"
            "call('semget', 0, 32000, 0o1600)\ncall('mq_open', b'a', 0o102, 0o600, 0)\nimport socket\n"
            "a, b = socket.socketpair()\nfor o in (7, 8): call('setsockopt', a.fileno(), 1, o, ctypes.byref(ctypes.c_int(1 << 30)), 4)"
        ),
        "what_all_processes_of_a_user_share": CALL.format(
            body="context = ctypes.c_ulong(0)\ncall('io_setup', 64, ctypes.byref(context))\ncall('inotify', 0)\n"
            "call('fanotify', 0x200, 0)"
        ),
        "lock_files_of_the_machine": CALL.format(
            body="fd = os.open(os.__file__, os.O_RDONLY)\ncall('flock', fd, 2 | 4)\ncall('fcntl', fd, 1024, 0)\n"
            "d = os.open('/usr/lib', os.O_RDONLY)\ncall('fcntl', d, 1026, 2)"
        ),
        "let_a_stopped_process_go_on": CALL.format(
            body="me, fd, info = os.getpid(), os.pidfd_open(os.getpid()), (ctypes.c_int * 32)(18, 0, -1)\n"
            "call('kill', me, 18)\ncall('kill', me, 0x100000012)\ncall('tkill', me, 18)\ncall('tgkill', me, me, 18)\n"
            "call('queue', me, 18, info)\ncall('pidfd_signal', fd, 18, 0, 0)\ncall('fcntl', fd, 10, 18)\n"
            "timer = ctypes.c_int()\ncall('timer_create', 1, 0, ctypes.byref(timer))\ncall('clone', 18, 0, 0, 0, 0)"
        ),
        "become_root": "import os, subprocess\nfor f in (lambda: os.setuid(0), lambda: os.setgid(0), lambda: os.setgroups([0])):\n"
        "    try: f(); print('ESCAPED')\n    except OSError: pass\nfor c in ('su', 'sudo -n id', 'mount'):\n"
        "    r = subprocess.run(c.split(), input='', capture_output=True, text=True) if os.path.exists('/usr/bin/' + c.split()[0])"
        " else None\n    if r and 'uid=0' in r.stdout: print('ESCAPED')",
        "daemon": "import os, time\nif os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0:\n        os.closerange(0, 99)\n"
        "        time.sleep(10 ** 6)\n    os._exit(0)",
        "inherited_files": "import os\nfor n in range(3, 256):\n    try: target = os.readlink(f'/proc/self/fd/{n}')\n"
        "    except OSError: target = ''\n    if target and not target.startswith(('pipe:', '/proc', 'anon_inode')):\n"
        "        print('ESCAPED', n, target)",
        "forged_answers": "import os, json\nline = json.dumps({'id': 'ready', 'status': 'ok', 'exit_code': 0, 'files': {}})\n"
        "for n in (1, 2, *range(3, 64)):\n    try: os.write(n, (line + '\\n').encode() * 9)\n    except OSError: pass\n"
        "raise SystemExit(7)",
        "one_large_answer": "import os, sys\nframe = sys._getframe()\nwhile 'replies' not in frame.f_locals: frame = frame.f_back\n"
        "asked, reply = frame.f_locals['request']['id'], frame.f_locals['replies']\n"
        "line = ('{\"id\": \"' + asked + '\", \"files\": ' + '[' * 4_000_000 + ']' * 4_000_000 + '}\\n').encode()\n"
        "while line: line = line[os.write(reply, line):]",
        "flood_of_answers": "import os\nwhile True:\n    for n in range(3, 16):\n        try: os.write(n, b'[' * 65536)\n"
        "        except OSError: pass",
    }


def _port(outside: Path) -> int:
    return int((outside / "port").read_text())


@contextmanager
def targets() -> Iterator[Path]:
    """Prepare the targets of the attempts: a secret file, a listening port and an abstract socket of this process."""
    import socket

    with tempfile.TemporaryDirectory() as folder, socket.socket() as tcp, socket.socket(socket.AF_UNIX) as unix:
        outside = Path(folder)
        outside.chmod(0o777)
        (outside / "secret").write_text(SECRET)
        tcp.bind(("127.0.0.1", 0))
        tcp.listen()
        unix.bind(f"\0polyturn-{os.getpid()}")
        unix.listen()
        (outside / "port").write_text(str(tcp.getsockname()[1]))
        os.environ["API_KEY"] = SECRET
        try:
            yield outside
        finally:
            del os.environ["API_KEY"]


def attempt(
    name: str, code: str, outside: Path, limits: SandboxLimits = LIMITS, *, slack_s: float | None = SLACK_S
) -> tuple[list[str], RunResult]:
    """Run one attempt in a new sandbox and return the violations (none: contained) and the result of the run.

    `slack_s` is the time that it may take beyond its timeout, in seconds; None if the machine may be busy.
    """
    isolation, why = find_isolation()
    if isolation is Isolation.NONE:
        raise SystemExit(why)
    files = sorted(p.name for p in outside.iterdir())
    wrong = []
    sandbox = Interpreter(limits, isolation=isolation, python=bare_python())
    start = time.monotonic()
    try:
        inside = processes_of(sandbox)
        result = sandbox.run(code)
        if slack_s is not None and time.monotonic() - start > limits.timeout_s + slack_s:
            wrong.append(f"took {time.monotonic() - start:.1f} s")
        inside |= processes_of(sandbox)
    finally:
        sandbox.close()
    if "ModuleNotFoundError" in result.stderr or "SyntaxError" in result.stderr or "NameError" in result.stderr:
        wrong.append(f"it did not run: {result.stderr[-200:]}")
    if "ESCAPED" in result.stdout + result.stderr:
        wrong.append(result.stdout[:300])
    if len(result.stdout) + len(result.stderr) > 2 * limits.output_bytes:
        wrong.append("more output than allowed")
    if name == "forged_answers" and (result.status, result.exit_code) not in (("exit", 7), ("error", 1)):
        wrong.append(f"a forged answer was believed: {result.status} {result.exit_code}")
    if sorted(p.name for p in outside.iterdir()) != files:
        wrong.append("a file was planted")
    wrong += [f"process {pid} is left" for pid in inside if is_running(pid)]
    return wrong, result


def is_running(pid: int) -> bool:
    """Return whether a process is running; a zombie is not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def processes_of(sandbox: Interpreter) -> set[int]:
    """Return the host's ids of a sandbox's processes, from its user or its first process's children."""
    ids, todo = set(), [sandbox.pid]
    while todo:
        pid = todo.pop()
        ids.add(pid)
        try:
            todo += [int(c) for t in Path(f"/proc/{pid}/task").iterdir() for c in (t / "children").read_text().split()]
        except OSError:
            continue
    return ids


def measure_speed(num: int = 60) -> dict[str, float]:
    """Return the times of a cold start, the first call of an episode from a warm pool, and a later call."""
    isolation, _ = find_isolation()
    start = lambda: Interpreter(SandboxLimits(), isolation=isolation, python=bare_python())  # noqa: E731
    cold, first, later, ends = [], [], [], []
    for _ in range(num // 3):
        began = time.perf_counter()
        start().close()
        cold.append(time.perf_counter() - began)
    pool = WarmPool(start, size=2)
    pool.open()
    for _ in range(num):
        while pool.num_ready < 2:
            time.sleep(0.005)
        began = time.perf_counter()
        sandbox = pool.take()
        sandbox.run("x = 1")
        first.append(time.perf_counter() - began)
        began = time.perf_counter()
        sandbox.run("x + 1")
        later.append(time.perf_counter() - began)
        began = time.perf_counter()
        sandbox.close()
        ends.append(time.perf_counter() - began)
    pool.close()
    pool.let_go()
    spans = {"start_and_end": cold, "first_call": first, "later_call": later, "kill": ends}
    out: dict[str, float] = {}
    for name, values in spans.items():
        out[f"{name}_p50_ms"] = round(statistics.median(values) * 1e3, 2)
        out[f"{name}_p99_ms"] = round(sorted(values)[int(len(values) * 0.99)] * 1e3, 2)
    return out


def main() -> None:
    """Run the attempts and print one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", help="Names of attempts.")
    parser.add_argument("--no-speed", action="store_true", help="Leave the times out: neither measure nor check any.")
    options = parser.parse_args()
    escapes, ended = {}, {}
    with targets() as outside:
        codes = attempts(outside)
        names = options.only or list(codes)
        for name in names:
            wrong, result = attempt(name, codes[name], outside, slack_s=None if options.no_speed else SLACK_S)
            ended[name] = result.status
            if wrong:
                escapes[name] = wrong
            if options.only:
                print(result, file=sys.stderr)
    speed = {} if options.no_speed else measure_speed()
    print(
        json.dumps(
            {
                "benchmark": "sandbox_escapes",
                "isolation": find_isolation()[0].value,
                "attempts": len(names),
                "escapes": len(escapes),
                "escaped": escapes,
                "ended": ended,
                **speed,
            }
        )
    )
    raise SystemExit(1 if escapes else 0)


if __name__ == "__main__":
    main()

"""The process inside a sandbox: reads a request, runs its code, reports its end. Standard library only.

It is given to the interpreter as source text, so that no file of the library is visible inside.

    <- {"id": "5f…", "code": "x = 1\\nx", "timeout_s": 10}
    -> {"id": "5f…", "status": "ok", "exit_code": 0, "sizes": []}  what the code prints goes to stdout and stderr

The requested files follow the answer's line, byte for byte, so that the code's output is never parsed outside. The code runs
in this process and could forge an answer, but gains nothing by it: the code could print the same content.
"""

# ruff: noqa: T201, SIM115, SIM113
# mypy: ignore-errors
import ast
import base64
import builtins
import gc
import json
import linecache
import os
import resource
import signal
import sys
import traceback


class TimeLimit(BaseException):
    """Raised in the code when its time is over."""


def confine(config):
    for kind, value in config["rlimits"]:
        hard = resource.getrlimit(kind)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(kind, (value, value))
    if config["uid"] is not None:
        os.setgroups([])
        os.setresgid(config["uid"], config["uid"], config["uid"])
        os.setresuid(config["uid"], config["uid"], config["uid"])
    os.chdir(config["cwd"])
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)


def run(code, names, number):
    """Run code as a notebook does: if the last statement is an expression, its value is printed."""
    file = f"<code {number}>"
    linecache.cache[file] = (len(code), None, code.splitlines(True), file)
    tree = ast.parse(code, file)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, file, "exec"), names)
    if last is not None:
        value = eval(compile(ast.Expression(last.value), file, "eval"), names)
        if value is not None:
            print(repr(value))


def run_program(request, names, number):
    """Run code as a script, with a text on stdin and files beside it."""
    for name, content in request["files"].items():
        folder = os.path.dirname(name)
        if folder:
            os.makedirs(folder, exist_ok=True)
        with open(name, "wb") as file:
            file.write(base64.b64decode(content))
    if "memory_bytes" in request:
        resource.setrlimit(resource.RLIMIT_AS, (request["memory_bytes"],) * 2)
    with open(".stdin", "w+b", buffering=0) as file:
        os.unlink(".stdin")
        text = memoryview(request["stdin"].encode("utf-8", "surrogatepass"))
        while text:
            text = text[file.write(text) :]
        file.seek(0)
        os.dup2(file.fileno(), 0)
    sys.stdin = open(0, encoding="utf-8", errors="surrogateescape", closefd=False)
    file = "<program>"
    code = request["code"]
    linecache.cache[file] = (len(code), None, code.splitlines(True), file)
    exec(compile(code, file, "exec"), names)


def answer(request, names, number):
    """Run the code of a request, and return (status, exit code)."""
    signal.setitimer(signal.ITIMER_REAL, request["timeout_s"])
    try:
        if request["is_program"]:
            run_program(request, names, number)
        else:
            run(request["code"], names, number)
        return "ok", 0
    except TimeLimit:
        return "timeout", None
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return "exit", (end.code or 0) & 0xFF
        print(end.code, file=sys.stderr)
        return "exit", 1
    except BaseException as problem:
        frames = problem.__traceback__
        while frames is not None and not frames.tb_frame.f_code.co_filename.startswith(("<code ", "<program>")):
            frames = frames.tb_next
        traceback.print_exception(type(problem), problem.with_traceback(frames), frames)
        return "error", 1
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def is_late(number, frame):
    raise TimeLimit


def fetch(names, most):
    """Return the content of each file; None for a file that is missing or too large."""
    files = []
    for name in names:
        content = None
        try:
            with open(name, "rb") as file:
                content = file.read(most + 1)
        except (OSError, ValueError):
            pass
        if content is not None and len(content) > most:
            content = None
        files.append(content)
        most -= len(content or b"")
    return files


def main():
    config = json.loads(sys.argv[1])
    requests, replies = config["requests"], config["replies"]
    os.set_inheritable(requests, False)
    os.set_inheritable(replies, False)
    confine(config)
    import site

    site.main()
    sys.argv = [""]
    signal.signal(signal.SIGALRM, is_late)
    me = os.getpid()
    names = {"__name__": "__main__", "__builtins__": builtins}
    streams = sys.stdout, sys.stderr
    os.write(replies, b'{"id": "ready", "status": "ready", "sizes": []}\n')
    reader = open(requests, "rb")
    number = 0
    for line in reader:
        request = json.loads(line)
        number += 1
        status, code, files = "error", 1, [None] * len(request["fetch"])
        try:
            status, code = answer(request, names, number)
            if os.getpid() == me:
                files = fetch(request["fetch"], request["max_fetched"])
        except TimeLimit:
            status, code = "timeout", None
        except BaseException:
            pass
        try:
            for stream in streams:
                stream.flush()
        except BaseException:
            pass
        if os.getpid() != me:
            os._exit(code or 0)  # a fork of the code came back here
        sizes = [None if content is None else len(content) for content in files]
        answer_line = json.dumps({"id": request["id"], "status": status, "exit_code": code, "sizes": sizes}).encode()
        for piece in (b"\n", answer_line, b"\n", *filter(None, files)):  # starts a new line, whatever the code wrote before
            piece = memoryview(piece)
            while piece:
                piece = piece[os.write(replies, piece) :]
        gc.collect(0)


main()

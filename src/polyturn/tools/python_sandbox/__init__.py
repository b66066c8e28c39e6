"""Runs the model's Python code safely: in a separate process, with separate namespaces and limits.

    limits.py      the limits of the code, and the result of a run
    isolation.py   bubblewrap, and the error without it
    seccomp.py     the system calls that are refused
    cgroup.py      limits of memory and processes for a whole sandbox, if the kernel offers control groups
    worker.py      the program inside the sandbox, passed as source text; it does not import this package
    interpreter.py the handle of one sandbox: start, run, kill
    standstill.py  stops all processes of a sandbox between two calls
    pool.py        sandboxes that are started in advance
    fusion.py      the result of a run in SandboxFusion's format
    tool.py        the tool

Reports from inside the sandbox, apart from the output, are not trusted: limits are enforced from outside.
"""

from polyturn.tools.python_sandbox.limits import RunResult, SandboxLimits
from polyturn.tools.python_sandbox.pool import WarmPool
from polyturn.tools.python_sandbox.tool import PythonSandbox

__all__ = ["PythonSandbox", "RunResult", "SandboxLimits", "WarmPool"]

"""Run the model's Python code where it can do no harm: a process of its own, in namespaces of its own, with limits.

    limits.py      how far the code may go, and how a run ended
    isolation.py   bubblewrap, and what is said where there is none
    seccomp.py     the system calls that are refused
    cgroup.py      memory and processes of a whole sandbox, where the kernel lends control groups
    worker.py      what runs inside, from its source text; it imports nothing of this package
    interpreter.py one sandbox seen from outside: start, run, kill
    standstill.py  between two calls nothing in it runs
    pool.py        sandboxes that wait, started already
    fusion.py      how a run ended, in SandboxFusion's words
    tool.py        the tool

Apart from its output, nothing that the inside reports is trusted: limits are enforced from outside.
"""

from polyturn.tools.python_sandbox.limits import RunResult, SandboxLimits
from polyturn.tools.python_sandbox.pool import WarmPool
from polyturn.tools.python_sandbox.tool import PythonSandbox

__all__ = ["PythonSandbox", "RunResult", "SandboxLimits", "WarmPool"]

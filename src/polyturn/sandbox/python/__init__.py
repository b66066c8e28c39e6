"""Runs Python code safely: in a separate process, with separate namespaces and limits.

    limits.py        the limits of the code, and the result of a run
    isolation.py     the command line of bubblewrap, and the error if bubblewrap does not work
    seccomp.py       the system calls that are refused
    cgroup.py        limits of memory and processes for a whole sandbox, if the kernel offers control groups
    worker.py        the program inside the sandbox, passed as source text; it does not import this package
    interpreter.py   the handle of one sandbox: start, run, kill
    standstill.py    stops all processes of a sandbox between two calls
    pool.py          sandboxes that are started in advance
    local_sandbox.py runs whole programs, as many at once as there are cores
    fusion.py        the result of a run in SandboxFusion's format

The code can forge the report about its run, so the report is not trusted: limits are enforced from outside.
"""

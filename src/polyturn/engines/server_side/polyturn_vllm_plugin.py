"""What every process of a vLLM server does at its start: leave the processor to others while it waits, on a CPU.

vLLM's processes wait for each other by calling `sched_yield` in a loop. There are kernels (6.18 is one) on which two such
loops on two cores keep everything else from running for seconds: the server's own HTTP process, so that an abort is read
after the completion that it was to end, and the trainer. A sleep of no length waits as well and does not. On a GPU machine
nothing changes.

The server finds this through the entry point in the folder beside it, which is on its PYTHONPATH.
"""


def register():
    """Let waiting processes sleep."""
    from vllm.distributed import utils
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        utils.USE_SCHED_YIELD = False

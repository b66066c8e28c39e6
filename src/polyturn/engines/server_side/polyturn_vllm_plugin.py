"""Loaded by every process of a vLLM server at its start, on a CPU: leave the processor to others while it waits, and note
the checksum of a matrix before it is packed for the processor, because the matrix itself is then thrown away.

vLLM's processes wait for each other by calling `sched_yield` in a loop. There are kernels (6.18 is one) on which two such
loops on two cores keep everything else from running for seconds: the server's own HTTP process, so that an abort is read
after the completion that it was to end, and the trainer. A sleep of no length waits as well and does not. On a GPU machine
nothing changes.

The server finds this through the entry point in the folder beside it, which is on its PYTHONPATH.
"""


def register():
    """Let waiting processes sleep, and packed matrices have a checksum."""
    from vllm.distributed import utils
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        utils.USE_SCHED_YIELD = False
        _note_before_packing()


def _note_before_packing():
    from polyturn_weights import written
    from vllm.model_executor.layers import utils

    if "dispatch_cpu_unquantized_gemm" not in vars(utils):
        return  # a version that packs elsewhere: those matrices have no checksum then
    pack = utils.dispatch_cpu_unquantized_gemm

    def packs(layer, *arguments, **options):
        if not layer.weight.is_meta and layer.weight.numel():
            layer.polyturn_checksum = written(layer.weight)
        return pack(layer, *arguments, **options)

    utils.dispatch_cpu_unquantized_gemm = packs  # its callers look it up when they call it

"""Loaded by every process of an SGLang server at its start: answer `/weights_checker` with checksums that add up.

SGLang's own are hashes: those of a fused or sharded tensor say nothing of its parts, and on a CPU there are none. The
server finds this through the entry point in the folder beside it, which is on its PYTHONPATH, and puts it in place by its
own hooks.
"""


def register():
    """Let the server compute checksums as the trainer does."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    target = "sglang.srt.utils.weight_checker.WeightChecker._compute_checksum"
    HookRegistry.register(target, _compute_checksum, HookType.REPLACE)


def _compute_checksum(self, skip_tensor_list=None, *, role):
    from polyturn_weights import checksums

    return {
        "checksums": checksums(self._model_state()),
        "per_gpu_checksum": "",
        "parallelism_info": self._parallelism_info(role=role).model_dump(),
    }

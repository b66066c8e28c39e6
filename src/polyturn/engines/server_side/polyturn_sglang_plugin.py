"""A plug-in for all processes of an SGLang server: answer `/weights_checker` with additive checksums.

SGLang's checksums are hashes: that of a fused or sharded tensor cannot be derived from its parts, and a CPU server has none.
The server finds this module by the entry point in the folder next to it, which is on its PYTHONPATH, and installs it by its
plug-in hooks.
"""


def register():
    """Make the server compute checksums like the trainer."""
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

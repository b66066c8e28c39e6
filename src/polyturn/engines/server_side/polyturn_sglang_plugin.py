"""A plug-in for all processes of an SGLang server: additive checksums, and adapters on a CPU.

SGLang's checksums (`/weights_checker`) are hashes: the hash of a fused or sharded tensor does not follow from the hashes of
its parts, and a CPU server computes none. Its adapters (`--enable-lora`) use pinned memory, which a machine without an
accelerator does not have, so a CPU server would not start.

The server finds this module by the entry point in the folder next to it, which is on its PYTHONPATH, and installs it by its
plug-in hooks.
"""


def register():
    """Make the server compute checksums like the trainer."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    target = "sglang.srt.utils.weight_checker.WeightChecker._compute_checksum"
    HookRegistry.register(target, _compute_checksum, HookType.REPLACE)
    import torch

    if not torch.accelerator.is_available():
        for method in ("__init__", "prepare_lora_batch"):
            HookRegistry.register(f"sglang.srt.lora.lora_manager.LoRAManager.{method}", _unpinned, HookType.AROUND)


def _unpinned(method, *args, **kwargs):
    """Call `method` while torch ignores requests for pinned memory."""
    from torch import Tensor
    from torch.overrides import TorchFunctionMode

    class Unpinned(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            if func is Tensor.pin_memory:
                return args[0]
            return func(*args, **{name: value for name, value in (kwargs or {}).items() if name != "pin_memory"})

    with Unpinned():
        return method(*args, **kwargs)


def _compute_checksum(self, skip_tensor_list=None, *, role):
    from polyturn_weights import checksums

    return {
        "checksums": checksums(self._model_state()),
        "per_gpu_checksum": "",
        "parallelism_info": self._parallelism_info(role=role).model_dump(),
    }

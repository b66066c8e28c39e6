"""Loaded inside a vLLM worker: loading new weights from a folder so that every kernel uses them.

This file is imported by the server's own Python, which knows nothing of polyturn, so it stands alone. The server finds it
through `--worker-extension-cls polyturn_vllm_worker.WeightLoader` and this folder on its PYTHONPATH; it is called through
`/collective_rpc`. vLLM's own reload leaves a language-model head that is tied to the embedding on its old weights where the
head keeps a packed copy (on a CPU it does), and answers that all went well.
"""

import base64
import os
from datetime import timedelta
from typing import Any

_TIMEOUT = timedelta(seconds=120)


class WeightLoader:
    """Mixed into vLLM's worker."""

    model_runner: Any
    vllm_config: Any
    rank: int
    _polyturn_held: dict[str, Any] | None = None
    _polyturn_groups: dict[str, Any] | None = None

    def polyturn_describe(self):
        """Return how the server runs, as far as training depends on it."""
        config = self.vllm_config
        return {
            "logprobs_mode": str(config.model_config.logprobs_mode),
            "max_model_len": config.model_config.max_model_len,
            "policy": str(config.scheduler_config.policy),
            "checksums": True,
            "routes": config.aux_output_config.enable_return_routed_experts,
        }

    def polyturn_checksums(self):
        """Return the checksum of each tensor, or of the matrix that it was packed from."""
        from polyturn_weights import checksums

        model = self.model_runner.get_model()
        packed = {
            f"{name}.weight (packed)": module.polyturn_checksum
            for name, module in model.named_modules()
            if "polyturn_checksum" in vars(module)
        }
        return {**checksums([*model.named_parameters(), *model.named_buffers()]), **packed}

    def polyturn_load_weights(self, folder):
        """Load the checkpoint in `folder`; return how many tied heads were tied anew."""
        if not os.path.isdir(folder):
            return "no folder"
        return self._polyturn_reload(weights_path=folder)

    def polyturn_hold(self, data):
        """Keep tensors, safetensors in base64, until all are there."""
        from safetensors.torch import load

        self._polyturn_hold_all(load(base64.b64decode(data)))

    def polyturn_open(self, handles, places):
        """Keep tensors that lie in memory of the trainer, which this process opens by its own one of `handles`."""
        from polyturn_weights import cut, open_shared

        memory = open_shared(handles[self.rank])
        self._polyturn_hold_all({name: tensor.clone() for name, tensor in cut(memory, places).items()})

    def polyturn_join(self, host, port, size, name, backend):
        """Join a process group of which the trainer is rank 0."""
        from torch.distributed import PrefixStore, TCPStore
        from torch.distributed.distributed_c10d import Backend, _new_process_group_helper, _world

        store = PrefixStore(name, TCPStore(host, port, size, is_master=False, timeout=_TIMEOUT))
        group, _ = _new_process_group_helper(
            size, 1 + self.rank, [], Backend(backend), store, group_name=name, timeout=_TIMEOUT
        )
        _world.pg_group_ranks[group] = {rank: rank for rank in range(size)}
        self._polyturn_groups = {**(self._polyturn_groups or {}), name: (group, backend)}

    def polyturn_has_group(self, name):
        """Return whether this process is in a group."""
        return name in (self._polyturn_groups or {})

    def polyturn_receive(self, name, tensors):
        """Keep the tensors, (name, dtype, shape) each, that the trainer broadcasts now."""
        import torch
        from torch.distributed import BroadcastOptions

        group, backend = (self._polyturn_groups or {})[name]
        device = torch.device("cuda", torch.cuda.current_device()) if backend == "nccl" else torch.device("cpu")
        came = {key: torch.empty(shape, dtype=getattr(torch, dtype), device=device) for key, dtype, shape in tensors}
        options = BroadcastOptions()
        options.rootRank = 0
        for work in [group.broadcast([tensor], options) for tensor in came.values()]:
            work.wait()
        self._polyturn_hold_all(came)

    def polyturn_leave(self, name):
        """Leave a group."""
        from torch.distributed import destroy_process_group

        group, _ = (self._polyturn_groups or {}).pop(name, (None, None))
        if group is not None:
            destroy_process_group(group)

    def polyturn_load_held(self):
        """Load the tensors that were kept; return how many tied heads were tied anew."""
        held, self._polyturn_held = self._polyturn_held or {}, None
        return self._polyturn_reload(weights_iterator=iter(held.items()))

    def _polyturn_hold_all(self, tensors):
        self._polyturn_held = {**(self._polyturn_held or {}), **tensors}

    def _polyturn_reload(self, **source):
        runner = self.model_runner
        runner.reload_weights(**source)
        model = runner.get_model()
        return _tie_heads(model) if runner.model_config.hf_text_config.tie_word_embeddings else 0


def _tie_heads(model):
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding

    embeddings = [m for m in model.modules() if isinstance(m, VocabParallelEmbedding) and not isinstance(m, ParallelLMHead)]
    heads = [m for m in model.modules() if isinstance(m, ParallelLMHead)]
    for head in heads:
        head.tie_weights(embeddings[0])
        head.quant_method.process_weights_after_loading(head)
    return len(heads)

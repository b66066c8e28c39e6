"""What runs inside a vLLM worker: loading new weights from a folder so that every kernel uses them.

This file is imported by the server's own Python, which knows nothing of polyturn, so it stands alone. The server finds it
through `--worker-extension-cls polyturn_vllm_worker.WeightLoader` and this folder on its PYTHONPATH; it is called through
`/collective_rpc`. vLLM's own reload leaves a language-model head that is tied to the embedding on its old weights where the
head keeps a packed copy (on a CPU it does), and answers that all went well.
"""

from typing import Any


class WeightLoader:
    """Mixed into vLLM's worker."""

    model_runner: Any
    vllm_config: Any

    def polyturn_describe(self):
        """Return how the server runs, as far as training depends on it."""
        config = self.vllm_config
        return {
            "logprobs_mode": str(config.model_config.logprobs_mode),
            "max_model_len": config.model_config.max_model_len,
            "policy": str(config.scheduler_config.policy),
        }

    def polyturn_load_weights(self, folder):
        """Load the checkpoint in `folder`; return how many tied heads were tied anew."""
        runner = self.model_runner
        runner.reload_weights(weights_path=folder)
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

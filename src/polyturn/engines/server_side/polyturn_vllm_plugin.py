"""A plug-in for all processes of a vLLM server: register the weight transfer over gloo, and answer `/weight_checker` with
additive checksums. On a CPU, it also makes waiting processes sleep, records the checksum of a matrix before vLLM packs and
discards the matrix, and updates a tied head with new weights.

vLLM's processes wait for each other by calling `sched_yield` in a loop. On some kernels (such as 6.18), two such loops on
two cores keep all other processes from running for seconds: the server's HTTP process, which then reads an abort after the
completion has finished, and the trainer. A sleep of length 0 waits without this effect.

On a CPU a tied head keeps a packed copy of the embedding. vLLM loads new weights only into the embedding and reports
success. On a GPU both are one tensor.

The server finds this module by the entry point in the folder next to it, which is on its PYTHONPATH.
"""


def register():
    """Install all changes to vLLM."""
    from vllm.platforms import current_platform

    _register_gloo()
    _check_by_sums()
    _look_for_the_folder()
    if current_platform.is_cpu():
        from vllm.distributed import utils

        utils.USE_SCHED_YIELD = False
        _note_before_packing()
        _tie_heads_after_loading()


def _register_gloo():
    try:
        from vllm.distributed.weight_transfer import WeightTransferEngineFactory
    except ImportError:
        return  # a version without weight transfer loads weights from a folder
    if "gloo" not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine("gloo", "polyturn_vllm_gloo", "GlooWeightTransferEngine")


def _check_by_sums():
    from polyturn_weights import checksums
    from vllm.v1.worker import gpu_worker

    def sums(model):
        packed = {
            f"{name}.weight (packed)": module.polyturn_checksum
            for name, module in model.named_modules()
            if "polyturn_checksum" in vars(module)
        }
        return {**checksums([*model.named_parameters(), *model.named_buffers()]), **packed}

    gpu_worker.compute_tensor_digests = sums  # vLLM's hash of a fused tensor cannot be derived from its parts


def _look_for_the_folder():
    import os

    from vllm.v1.worker import gpu_worker

    reload = gpu_worker.Worker.reload_weights

    def reloads(self, *arguments, weights_path=None, **options):
        if weights_path is not None and not os.path.isdir(weights_path):
            return "no folder"  # vLLM notices only after removing its parameters, and crashes
        return reload(self, *arguments, weights_path=weights_path, **options)

    gpu_worker.Worker.reload_weights = reloads


def _note_before_packing():
    from polyturn_weights import written
    from vllm.model_executor.layers import utils

    if "dispatch_cpu_unquantized_gemm" not in vars(utils):
        return  # a version that packs elsewhere: its matrices then have no checksum
    pack = utils.dispatch_cpu_unquantized_gemm

    def packs(layer, *arguments, **options):
        if not layer.weight.is_meta and layer.weight.numel():
            layer.polyturn_checksum = written(layer.weight)
        return pack(layer, *arguments, **options)

    utils.dispatch_cpu_unquantized_gemm = packs  # callers look it up at each call


def _tie_heads_after_loading():
    from vllm.model_executor.model_loader.reload import layerwise

    finalize = layerwise.finalize_layerwise_processing

    def finalizes(model, model_config):
        finalize(model, model_config)
        if model_config.hf_text_config.tie_word_embeddings:
            _tie_heads(model)

    layerwise.finalize_layerwise_processing = finalizes  # every transport of weights ends here


def _tie_heads(model):
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding

    embeddings = [m for m in model.modules() if isinstance(m, VocabParallelEmbedding) and not isinstance(m, ParallelLMHead)]
    for head in (m for m in model.modules() if isinstance(m, ParallelLMHead)):
        head.tie_weights(embeddings[0])
        head.quant_method.process_weights_after_loading(head)

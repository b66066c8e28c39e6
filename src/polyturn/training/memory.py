"""What the processes of a run hold, in bytes, and how long new weights take: formulas over the sizes of a model.

    rank      (b + m + 8 + g) P / N, b P / N for each frozen model, the gathered blocks, activations     FSDP2 over N, AdamW
    server    b P / t + KV cache                                                                         t: tensor parallel
    sync      b P / B, once for all servers of a broadcast                                               B: bytes/s of a link

P numbers of b bytes each. In float32 b is 4, there are no masters (m = 0), and g is 4. In bfloat16 b is 2, m is 4, and g is
4 + 2: gradients are summed in float32, while those of one backward pass are still there in bfloat16.
"""

from __future__ import annotations

from dataclasses import dataclass

from transformers import PreTrainedModel

from polyturn.training.modality_encoders import layers_of, towers_of
from polyturn.training.network import MAX_LOGITS, MAX_LOGITS_CPU, MIN_CHUNK


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSize:
    """The sizes that memory depends on."""

    parameters: int
    """Tied ones count once."""
    trained: int
    """How many of them have gradients: with an adapter those of the adapter."""
    layer: int
    """Parameters of the largest layer, which is gathered by itself."""
    outside: int
    """Parameters outside the layers, which are gathered together and stay so for a pass."""
    element: int
    """Bytes of one."""
    hidden: int
    num_layers: int
    vocab: int
    kv_width: int
    """Numbers of keys, or of values, that a token has in a layer."""

    @classmethod
    def of(cls, model: PreTrainedModel) -> ModelSize:
        """Return the sizes of a model, which needs no weights."""
        config = model.config.get_text_config()
        layers = [sum(p.numel() for p in layer.parameters()) for layer in layers_of(model, towers_of(model))]
        parameters = sum(p.numel() for p in model.parameters())
        fields = config.to_dict()
        heads = fields.get("num_key_value_heads") or config.num_attention_heads
        width = fields.get("head_dim") or config.hidden_size // config.num_attention_heads
        return cls(
            parameters=parameters,
            trained=sum(p.numel() for p in model.parameters() if p.requires_grad),
            layer=max(layers, default=0),
            outside=parameters - sum(layers),
            element=next(model.parameters()).element_size(),
            hidden=int(config.hidden_size),
            num_layers=int(config.num_hidden_layers),
            vocab=int(config.vocab_size),
            kv_width=int(heads * width),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RankLoad:
    """What a run asks of each trainer rank beside the model."""

    ranks: int = 1
    num_trained: int = 1
    """Models of this size that are trained: the policy, and a critic where the estimator needs one."""
    num_frozen: int = 0
    """Models beside it that are only scored with: a reference, a teacher."""
    tokens: int = 0
    """Of a micro-batch."""
    recomputes: bool = False
    """Whether layers are computed again in the backward pass."""
    on_gpu: bool = True


def rank_bytes(size: ModelSize, load: RankLoad) -> dict[str, int]:
    """Return what a trainer rank holds at the moment when it holds most, by what it is.

    Activations are 34 bytes of 16-bit numbers of the hidden width for each token and layer (Korthikanti et al. 2022,
    Reducing Activation Recomputation in Large Transformer Models, eq. 1, without the scores of attention, which are not kept
    whole); only each layer's input where layers are computed again.
    """
    low, copies = size.element < 4, load.num_trained
    at_once = max(MIN_CHUNK, (MAX_LOGITS if load.on_gpu else MAX_LOGITS_CPU) // size.vocab)
    # A layer is gathered while the one before it is still there, and its gradient is whole before it is cut.
    gathered = (2 * size.outside + 3 * size.layer) * size.element if load.ranks > 1 else 0
    return {
        "parameters": copies * size.parameters * size.element // load.ranks,
        "float32 masters": copies * size.trained * 4 // load.ranks if low else 0,
        "gradients": copies * size.trained * (4 + (size.element if low else 0)) // load.ranks,
        "moments of AdamW": copies * size.trained * 8 // load.ranks,
        "frozen models": load.num_frozen * size.parameters * size.element // load.ranks,
        "gathered blocks": gathered,
        f"activations of a micro-batch of {load.tokens} tokens": (
            load.tokens * size.hidden * size.num_layers * (1 if load.recomputes else 17) * size.element
        ),
        "logits": 3 * 4 * min(load.tokens, at_once) * size.vocab,
    }


def server_bytes(size: ModelSize, *, tensor_parallel: int = 1, tokens: int = 0) -> dict[str, int]:
    """Return what each GPU of an inference server holds whose KV cache has room for `tokens`."""
    cache = 2 * size.num_layers * size.kv_width * size.element * tokens
    return {"weights": size.parameters * size.element // tensor_parallel, "KV cache": cache // tensor_parallel}


def sync_seconds(size: ModelSize, *, link: float) -> float:
    """Return how long the weights take to all servers of a broadcast over a link of `link` bytes a second."""
    return size.parameters * size.element / link

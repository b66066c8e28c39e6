"""The matrix of models over ranks: what a case trains on ranks and in one process, and how far the two differ.

    results_of_ranks("support.rank_matrix:measure", 2, folder / "found.json", "fsdp", "short")
    {"tensor": [{"0/scores": 3e-08, "0/gradient": 2e-17, "0/norm": 0.0, "loaded": 0.0, ...}, <the second rank's>], ...}

Each comparison is made on the ranks, where the tensors are; test_fsdp.py and test_megatron.py judge it.
"""

import collections
import contextlib
import copy
import dataclasses
import functools
import itertools
import json
import warnings
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from PIL import Image
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

from polyturn.algorithms.aggregate import loss_coefs
from polyturn.algorithms.losses import policy_losses
from polyturn.algorithms.options import AlgorithmOptions, DistillSettings, KlOptions, RoutingOptions
from polyturn.batching.layout import LayoutSettings
from polyturn.core.errors import AlignmentError
from polyturn.core.messages import Message
from polyturn.tokens.codec import Codec
from polyturn.tokens.multimodal import MediaProcessor
from polyturn.training import fsdp
from polyturn.training.critic import Critic, CriticSettings, critic_backend, value_coefs
from polyturn.training.hf import checkpoint_activations, load_unread
from polyturn.training.lora import adapter_tensors, add_lora
from polyturn.training.loss_terms import LossSettings
from polyturn.training.options import Degrees, LoraSettings, OptimSettings
from polyturn.training.policy import ModelPolicy, policy_backend
from support.bucket_ranks import counted_calls
from support.megatron_cpu import pretend
from support.models import in_float64, tiny_model
from support.samples import sample_of
from support.states import stored, tensors_in
from support.vision import tiny_processor, tiny_vision_model, vision_tokenizer

VOCAB, LAYERS = 48, 2
EXPERTS = ("qwen3_moe", "mixtral", "deepseek_v3", "exact_moe")
OPTIM = OptimSettings(lr=1e-2, max_grad_norm=0.1, weight_decay=0.1, max_skipped=1)
VALUES = CriticSettings(clip=0.2)
ALIKE = 5
"""Tokens that samples begin with in common where the layout shares prefixes."""
LAYOUTS = {
    "rows": LayoutSettings(max_tokens_per_batch=24),
    "packed": LayoutSettings(max_tokens_per_batch=60, packed=True),
    "shared": LayoutSettings(max_tokens_per_batch=60, packed=True, shared_prefix=True, min_saving=0.0, min_shared=2),
}
SCALED = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}


@dataclass(frozen=True, kw_only=True)
class Case:
    """One comparison."""

    ranks: int = 2
    kind: str = "exact"
    """A tiny model's, "vision", or in float64 "exact", Qwen3, and "exact_moe", Qwen3-MoE."""
    num_experts: int = 8
    degrees: Degrees = field(default_factory=Degrees)
    is_critic: bool = False
    layout: str = "rows"
    """How samples lie on the ranks; in one process they lie in rows."""
    loss: str = "ppo_clip"
    lora: object = None
    """The modules that an adapter is on."""
    has_teacher: bool = False
    is_recomputed: bool = False
    is_tied: bool = True
    is_bfloat16: bool = False
    """The ranks then begin with other weights and take the first ones, which the float32 masters must follow."""
    is_short: bool = False
    """`make test` compares it."""

    @property
    def reads_files(self):
        """Whether ranks read their part of a model's files; a model in float64 or of images is in none."""
        return not self.is_critic and not self.is_bfloat16 and self.kind not in ("exact", "exact_moe", "vision")


AXES = ("tensor", "pipeline", "expert", "context")


def split(**axes):
    """Return the degrees of parallelism by short names: `split(tensor=2)`."""
    return Degrees(**{f"{name}_parallel": number for name, number in axes.items()})


def case(ranks, kind, **options):
    """Return a case from short names: the axes that ranks split, `short`, and the fields."""
    axes = split(**{name: options.pop(name) for name in AXES if name in options})
    axes = dataclasses.replace(axes, gradient_sync=options.pop("sync", "each"))
    return Case(ranks=ranks, kind=kind, degrees=axes, is_short=options.pop("short", False), **options)


FSDP = {
    "shards": case(2, "exact", has_teacher=True, short=True),
    "tensor": case(2, "exact", tensor=2, has_teacher=True, short=True),
    "last_sync": case(2, "exact", sync="last", short=True),
    "last_sync_bfloat16": case(2, "qwen3", sync="last", is_bfloat16=True, short=True),
    "last_sync_tensor": case(4, "exact", sync="last", tensor=2),
    "critic": case(2, "exact", is_critic=True, short=True),
    "experts": case(2, "exact_moe", expert=2, short=True),
    "experts_files": case(2, "qwen3_moe", expert=2, short=True),
    "experts_tensor": case(2, "qwen3_moe", expert=2, tensor=2),
    "experts_last_sync": case(2, "exact_moe", expert=2, sync="last", layout="packed", is_recomputed=True, short=True),
    "experts_lora": case(2, "exact_moe", expert=2, lora=["q_proj", "v_proj"]),
    "experts_critic": case(2, "exact_moe", expert=2, is_critic=True),
    "experts_bfloat16": case(2, "qwen3_moe", expert=2, is_bfloat16=True),
    "vision": case(2, "vision", short=True),
    "vision_critic": case(2, "vision", is_critic=True, short=True),
    "bfloat16": case(2, "qwen3", is_bfloat16=True, short=True),
    "bfloat16_critic": case(2, "qwen3", is_bfloat16=True, is_critic=True, short=True),
    "files": case(2, "qwen3", has_teacher=True, short=True),
    "files_tensor": case(2, "qwen3", tensor=2, has_teacher=True),
    "files_lora": case(2, "qwen3", lora="all-linear", short=True),
    "context": case(2, "exact", context=2, layout="packed", loss="gspo", short=True),
    "context_shared": case(2, "exact", context=2, layout="shared", loss="gspo"),
    "context_experts": case(2, "qwen3_moe", context=2, layout="packed", short=True),
    "context_critic": case(2, "exact", context=2, layout="packed", is_critic=True, short=True),
    "context_lora": case(2, "exact", context=2, layout="packed", loss="gspo", lora="all-linear"),
    "context_recomputed": case(2, "exact", context=2, layout="packed", loss="gspo", is_recomputed=True),
    "lora": case(2, "exact", lora="all-linear"),
    "lora_tensor": case(2, "exact", tensor=2, lora="all-linear"),
    "critic_tensor": case(2, "exact", tensor=2, is_critic=True),
    "mixtral": case(2, "mixtral", expert=2),
    "deepseek": case(2, "deepseek_v3", expert=2),
    "matrices": case(2, "qwen3_moe", tensor=2),
    "context_rows": case(4, "exact", context=2, layout="shared", loss="gspo"),
    "context_rows_critic": case(4, "exact", context=2, layout="packed", is_critic=True),
    "context_tensor": case(4, "exact", context=2, tensor=2, layout="shared", loss="gspo"),
    "context_tensor_critic": case(4, "exact", context=2, tensor=2, layout="packed", is_critic=True),
    "experts_copies": case(4, "exact_moe", expert=2, sync="last"),
    "experts_of_four": case(4, "exact_moe", expert=4, layout="shared", is_recomputed=True),
    "experts_cut": case(4, "qwen3_moe", expert=2, num_experts=6),
    "experts_rows": case(4, "qwen3_moe", expert=4, tensor=2, is_recomputed=True),
    "experts_context": case(4, "exact_moe", expert=4, context=2, layout="packed"),
}
AGAIN = {"layout": "shared", "is_recomputed": True}
MEGATRON = {
    "dense": case(1, "qwen3"),
    "moe": case(1, "qwen3_moe"),
    "qwen2": case(1, "qwen2"),
    "llama": case(1, "llama", is_tied=False),
    "data": case(2, "llama", is_tied=False, short=True),
    "tensor": case(2, "qwen3", tensor=2, layout="shared"),
    "tensor_qwen2": case(2, "qwen2", tensor=2, is_tied=False),
    "tensor_moe": case(2, "qwen3_moe", tensor=2, expert=2, short=True),
    "expert": case(2, "qwen3_moe", expert=2),
    "pipeline": case(2, "qwen3", pipeline=2),
    "pipeline_moe": case(2, "qwen3_moe", pipeline=2, is_tied=False, short=True, **AGAIN),
    "context": case(2, "qwen3", context=2, layout="shared"),
    "context_moe": case(2, "qwen3_moe", context=2, expert=2, is_tied=False, short=True, **AGAIN),
    "lora_tensor": case(2, "qwen2", tensor=2, lora="all-linear", short=True, **AGAIN),
    "lora_pipeline": case(2, "qwen3", pipeline=2, lora=["q_proj", "v_proj", "up_proj"], is_tied=False, short=True),
    "lora_moe": case(2, "qwen3_moe", tensor=2, expert=2, lora=["q_proj", "o_proj"]),
    "lora_context": case(2, "qwen2", context=2, lora="all-linear", layout="packed"),
    "critic_tensor": case(2, "qwen3", tensor=2, is_critic=True, short=True),
    "critic_pipeline": case(2, "qwen2", pipeline=2, is_critic=True, short=True),
    "critic_context": case(2, "qwen3", context=2, is_critic=True, layout="packed", short=True),
    "critic_bfloat16": case(2, "qwen3", tensor=2, is_critic=True, is_bfloat16=True, short=True),
    "rows_of_tensor": case(4, "qwen3_moe", tensor=2, expert=2, layout="shared"),
    "rows_of_stages": case(4, "qwen2", pipeline=2),
    "rows_of_context": case(4, "llama", context=2, is_tied=False, layout="shared"),
    "context_tensor": case(4, "qwen3", context=2, tensor=2, layout="shared"),
    "context_tensor_moe": case(4, "qwen3_moe", context=2, tensor=2, expert=4, layout="shared"),
    "context_stages": case(4, "qwen3_moe", context=2, pipeline=2, expert=2, layout="shared"),
    "context_of_four": case(4, "qwen3", context=4, layout="shared"),
    "critic_context_tensor": case(4, "qwen3", context=2, tensor=2, is_critic=True, layout="packed"),
    "critic_context_stages": case(4, "qwen2", context=2, pipeline=2, is_critic=True, layout="packed"),
}
CASES = {"fsdp": FSDP, "megatron": MEGATRON}


def names_of(backend, *, is_short):
    return [name for name, case in CASES[backend].items() if case.is_short == is_short]


def judge(backend, name, results):
    """Assert that the ranks of a case are as near to one process as its numbers are exact."""
    case = CASES[backend][name]
    close = 1e-9 if case.kind in ("exact", "exact_moe") else 1e-5
    # Scores are float32; AdamW divides a gradient by its own size, so that rounding of the smallest ones shows in a step.
    bounds = {"scores": 1e-5, "state": max(close, 5e-4 * (close > 1e-9)), "loaded": 0.0, "back": 0.0}
    bounds["weights"] = bounds["state"]
    bounds["begins"] = close if case.lora is not None and backend == "fsdp" else 0.0
    if case.is_bfloat16:
        bounds = dict.fromkeys(("state", "weights"), 0.05) | {"begins": 0.0, "loaded": 0.0, "back": 0.0}
    for rank, found in enumerate(results):
        found = {what: value for what, value in found.items() if what != "written"}
        sizes = {what: found.pop(what) for what in list(found) if what.endswith("largest")}
        calls = [found.pop(what) for what in list(found) if what.endswith("/calls")]
        # Sum and gather for dense weights, experts and a float32 head, sum the three kinds of a row, and the norm.
        assert all(count <= 10 for count in calls), "a step communicates once for many tensors"
        assert all(size > 1e-4 for size in sizes.values()), "the numbers are too small to tell a difference"
        share = found.pop("read/share", 0.0)
        splits_layers = max(case.degrees.tensor_parallel, case.degrees.pipeline_parallel, case.degrees.expert_parallel) > 1
        assert share < (0.9 if splits_layers or (backend == "fsdp" and case.ranks > 1) else 1.01), "it reads its own part"
        if case.is_bfloat16:
            found = {what: value for what, value in found.items() if what.rpartition("/")[2] in bounds}
        limits = {what: bounds.get(what.rpartition("/")[2].removeprefix("reference_"), close) for what in found}
        wrong = {what: value for what, value in found.items() if not value <= limits[what]}
        assert wrong == {}, f"{name}, rank {rank}"


class ExactRouter(Qwen3MoeTopKRouter):
    """Qwen3-MoE's router without its rounding to float32."""

    def forward(self, hidden):
        logits = torch.nn.functional.linear(hidden, self.weight)
        weights, experts = torch.topk(logits.softmax(-1), self.top_k, dim=-1)
        return logits, weights / weights.sum(-1, keepdim=True), experts


def exact_model(seed=0, layers=LAYERS, kind="qwen3", **sizes):
    """A tiny Qwen3 in float64."""
    model = in_float64(tiny_model(VOCAB, kind, hidden=16, layers=layers, heads=2, kv_heads=2, seed=seed, **sizes))
    for module in model.modules():
        if isinstance(module, Qwen3MoeTopKRouter):
            module.__class__ = ExactRouter
    if kind == "qwen3_moe":  # torch groups no matrices in float64
        model.set_experts_implementation("eager")
    return model


def base_of(case, device, *, seed=0):
    """Return the model of a case without its adapter."""
    if case.kind == "exact":
        return exact_model(seed).to(device)
    if case.kind == "exact_moe":
        return exact_model(seed, kind="qwen3_moe", spread=0.1, experts=case.num_experts).to(device)
    if case.kind == "vision":
        return vision().model()
    # FlexAttention, which attends on a GPU where rows stand end to end, knows no head below 16.
    hidden = 64 if device.type == "cuda" else 16
    sizes = {"hidden": hidden, "layers": LAYERS, "heads": 4, "kv_heads": 2, "experts": case.num_experts}
    model = tiny_model(VOCAB, case.kind, spread=0.1, seed=seed, **sizes)
    if not case.is_tied:
        scaled = {"rope_parameters": SCALED} if case.kind == "llama" else {}
        own = {**model.config.to_dict(), "tie_word_embeddings": False, **scaled}
        model = type(model)(type(model.config)(**own)).float().eval()
    return (model.bfloat16() if case.is_bfloat16 else model).to(device)


def adapted(model, targets):
    """Return the model with an adapter that is not 0."""
    add_lora(model, LoraSettings(rank=3, alpha=6.0, target_modules=targets), seed=1)
    with torch.no_grad():
        for number, tensor in enumerate(adapter_tensors(model).values()):
            tensor.normal_(0, 0.2, generator=torch.Generator().manual_seed(number))
    return model


class Vision:
    """The model and samples of a case with pictures."""

    def __init__(self):
        self.tokenizer = vision_tokenizer()
        self.codec = Codec(self.tokenizer)
        self.media = MediaProcessor(tiny_processor(self.tokenizer), self.codec)

    def model(self):
        return tiny_vision_model(self.tokenizer, layers=1)

    def samples(self):
        """Return samples that show a picture, two pictures, and none."""
        pictures = [Image.new("RGB", (28, 28), "red")], [Image.new("RGB", (56, 28), c) for c in ("blue", "green")], []
        return [self.sample(number, shown) for number, shown in enumerate(pictures)]

    def sample(self, number, pictures):
        parts = [{"type": "image", "image": picture} for picture in pictures] + [{"type": "text", "text": "What is this?"}]
        message = Message(role="user", content=tuple(parts))
        prompt = self.codec.encode(self.codec.template.render([message], add_generation_prompt=True))
        ids = np.concatenate([self.media.expand(prompt, [message]), self.codec.encode(" 7 apples")])
        weights = (np.arange(len(ids)) >= len(ids) - 3).astype(np.float32)
        noise = np.random.default_rng(number).normal(size=len(ids))
        return sample_of(
            ("g", str(number), 0),
            ids,
            weights,
            media=message.media,
            advantages=noise,
            returns=noise,
            values=np.zeros(len(ids)),
            old_logprobs=np.full(len(ids), -5.0),
            ref_logprobs=np.full(len(ids), -5.5),
        )


vision = functools.cache(Vision)


def samples_of(case, seed, size, *, routes_to=None):
    """Samples of uneven lengths, which begin alike where that can be shared, with values and returns.

    Tokens that are routed went to the first `routes_to` experts by chance, and where all may be meant some have no route.
    """
    if case.kind == "vision":
        return vision().samples()
    common, rng = np.random.default_rng(0), np.random.default_rng(seed)
    shared = ALIKE if case.layout == "shared" else 0
    layers = 1 if case.kind == "deepseek_v3" else LAYERS
    first, first_routes = common.integers(0, VOCAB, shared), common.integers(0, 4, (shared, layers, 2))
    first_routes[..., 1] += 4  # two experts that differ
    out = []
    for i in range(size):
        n = int(rng.integers(4 + shared, 24))
        weights = rng.choice([0.0, 0.5, 1.0], size=n).astype(np.float32)
        weights[0], weights[-1] = 0.0, 1.0
        ids = rng.integers(0, VOCAB, n).astype(np.int32)
        routes = np.argsort(rng.random((n, layers, routes_to or 8)), axis=-1)[:, :, :2].astype(np.uint8)
        routes[rng.random(n) < (0.2 if routes_to != 2 else 0)] = 255
        ids[:shared], routes[:shared] = first, first_routes
        old, ref = (rng.normal(-3.8, 0.3, n).astype(np.float32) for _ in range(2))
        out.append(
            sample_of(
                ("g", str(i), 0),
                ids,
                weights,
                temperature=0.7 + 0.3 * (i % 2),
                old_logprobs=old,
                ref_logprobs=ref,
                advantages=rng.normal(size=n).astype(np.float32),
                returns=rng.normal(size=n),
                values=np.zeros(n),
                routed_experts=None if routes_to is None else routes,
            )
        )
    return out


def loss_of(case):
    routing = RoutingOptions(balance_coef=0.5 if case.kind in EXPERTS else 0.0)
    algorithm = AlgorithmOptions(kl=KlOptions(coef=0.1), entropy_coef=0.01, routing=routing)
    own = {"policy_loss_kwargs": {"clip_high": 0.28}} if case.loss == "ppo_clip" else {}
    own |= {"distill": DistillSettings(teacher="teacher", coef=0.1)} if case.has_teacher else {}
    return LossSettings(policy_loss=policy_losses.resolve(case.loss), algorithm=algorithm, **own)


def placement_of(case, backend, device, *, start=None):
    """Return the placement of this rank's part of a model."""
    if backend == "megatron":
        from polyturn.training.megatron.placement import Megatron

        return Megatron(case.degrees, device, start=start)
    return fsdp.Sharded.of(case.degrees, device, start=start)


def make(case, model, placement=None, **changes):
    """Return the policy or critic that trains `model`; in this process alone without a placement."""
    options = {"optim": OPTIM, "layout": LAYOUTS["rows" if placement is None else case.layout], "placement": placement}
    options |= {"media": vision().media} if case.kind == "vision" else {}
    if case.is_critic:
        return Critic(critic_backend(model, settings=VALUES, **options | changes), settings=VALUES)
    loss = loss_of(case)
    options |= {"teacher": base_of(case, torch.device("cpu"), seed=1)} if case.has_teacher else {}
    return ModelPolicy(policy_backend(model, loss=loss, **{"reference": True} | options | changes), loss=loss)


def row_of(case, backend):
    """Return the number of this rank's row, whose ranks split the same samples, how many there are and how wide they are."""
    degrees = case.degrees
    width = degrees.tensor_parallel * degrees.pipeline_parallel * degrees.context_parallel
    return dist.get_rank() // width, dist.get_world_size() // width, width


NUMBERS = itertools.count()


def folder_of(name):
    """Return a folder that has one name on all ranks."""
    return Path.cwd() / f"{name}-{dist.get_world_size()}-{next(NUMBERS)}"


def stored_by_all(made):
    """Save what every rank has, or has a part of; the folder always has one name, because each new one would be another
    group of the ranks."""
    return stored(made, folder_of("state") / "state")


def largest(pairs):
    return max((float(np.abs(np.asarray(a) - np.asarray(b)).max()) for a, b in pairs), default=0.0)


def difference(one, many):
    """Compare tensors of the same names."""
    assert one.keys() == many.keys(), one.keys() ^ many.keys()
    pairs = ((one[name].cpu(), many[name].cpu()) for name in one)
    return max((float((a - b).abs().max()) for a, b in pairs if a.numel()), default=0.0)


def whole_of(backend, *, is_merged=True):
    """Return the whole weights on the first rank, and None on others."""
    return backend.gathered(list(backend.kinds(is_merged)), is_merged)


def own_weights(made):
    """Return the weights that one process gives to an engine: an adapter merged, of tied weights the first."""
    own = made.backend.network.own_tensors()
    return own if isinstance(made, Critic) else {name: made.backend.weights()[name] for name in own}


def whole_gradients(case, backend, made):
    """Return the gradients of the ranks, whole on the first; Megatron's are used up by it."""
    if backend == "fsdp":
        return {n: p.grad.full_tensor() for n, p in made.backend.model.named_parameters() if p.grad is not None}
    optimizer, names = made.backend.optimizer, made.backend.network.names
    optimizer._total_norm([p for _, p in optimizer._named])
    parts = {n: optimizer._as_rows(n, p.grad).full_tensor() for n, p in optimizer._named}
    gradients = {name: names.whole(parts, name) for name in names.kinds(parts)}
    optimizer.zero_grad()
    return gradients


@contextlib.contextmanager
def layer_passes(decoder):
    """Count how often the layers of a stage are called, and how often attention of the first of them."""
    passes, attention = collections.Counter(), decoder.layers[0].self_attention.core_attention
    hooks = [
        module.register_forward_pre_hook(lambda *_, name=name: passes.update([name]))
        for name, module in (("model", decoder), ("layer", attention))
    ]
    yield passes
    for hook in hooks:
        hook.remove()


@contextlib.contextmanager
def counted_reads(backend):
    """Yield the numbers of bytes that this rank reads of a model's files."""
    from polyturn.training.megatron import placement as megatron

    module, reads = {"fsdp": fsdp, "megatron": megatron}[backend], []
    read = module.read_weights
    module.read_weights = lambda *args, **options: reads.append(read(*args, **options))
    try:
        yield reads
    finally:
        module.read_weights = read


def begin(case, backend, base, device):
    """Return the policy or critic that the ranks train first, and the findings about its first weights."""
    placed, found = functools.partial(placement_of, case, backend, device), {}
    model = copy.deepcopy(base) if case.lora is None else adapted(copy.deepcopy(base), case.lora)
    if case.is_critic:
        policy = policy_backend(copy.deepcopy(model), placement=placed(), optim=OPTIM)
        return make(case, model, placed(start=policy.held())), found
    if not case.reads_files:
        return make(case, prepared(case, model), placed()), found
    folder, teaching = folder_of("model"), folder_of("teacher")
    if dist.get_rank() == 0:
        base.save_pretrained(folder)
        base_of(case, device, seed=1).save_pretrained(teaching)
    dist.barrier()
    teacher = {"teacher": load_unread(teaching)} if case.has_teacher else {}
    with counted_reads(backend) as reads:
        unread = load_unread(folder)
        unread = unread if case.lora is None else adapted(unread, case.lora)
        made = make(case, prepared(case, unread), placed(), **teacher)
    return made, {"read/share": reads[0] / (folder / "model.safetensors").stat().st_size}


def prepared(case, model):
    if case.is_recomputed:
        checkpoint_activations(model)
    return model


def moved(many, base, samples, share):
    """Return the distance of scores from those of one process with the same weights after every group of them was moved, and
    whether all weights are the same as before once it was moved back. Ranks that hold the same must move it alike."""
    backend, found = many.backend, {}
    before = whole_of(backend)
    for group in backend.weight_groups():
        backend.shift_weights(group, 0.1)
    there = [whole_of(backend)]
    dist.broadcast_object_list(there, src=0)
    model = copy.deepcopy(base)
    model.load_state_dict(there[0], strict=False)  # without a tied head
    other = ModelPolicy(policy_backend(model, optim=OPTIM))
    a, b = other.score(samples), many.score([samples[i] for i in share])
    found["moved/scores"] = largest([(a[i], b[k]) for k, i in enumerate(share)])
    for group in backend.weight_groups():
        backend.shift_weights(group, 0.0)
    after = whole_of(backend)
    if dist.get_rank() == 0:
        found |= {"moved/largest": difference(before, there[0]), "moved/back": difference(before, after)}
    return found


def trained_alike(case, backend, one, many, samples, mine):
    """Let both train on the samples, of which this rank has those numbered `mine`, up to the optimizer's step, and return
    how far scores, loss and gradient differ."""
    found, (_, rows, width) = {}, row_of(case, backend)
    for more in [{}] if case.is_critic else [{}, {"reference": True}]:
        a, b = one.score(samples, **more), many.score([samples[i] for i in mine], **more)
        found["reference_scores" if more else "scores"] = largest([(a[i], b[k]) for k, i in enumerate(mine)])
    if case.is_critic:
        samples = [s.replace(values=v) for s, v in zip(samples, a, strict=True)]
    share = [samples[i] for i in mine]
    every = value_coefs(samples) if case.is_critic else loss_coefs(samples, mode="token-mean")
    coefs = [every[i] for i in mine]
    if samples[0].routed_experts is not None and rows == 1:
        other = [s.replace(routed_experts=s.routed_experts[:, :1].repeat(3, axis=1)) for s in share]
        with pytest.raises(AlignmentError):
            many.forward_backward(other, coefs=coefs)
    first, counts = one.forward_backward(samples, coefs=every), contextlib.nullcontext({})
    if backend == "megatron":
        counts = layer_passes(many.backend.network.saved.decoder)
    with counts as passes:
        second = many.forward_backward(share, coefs=coefs)
    assert not passes or passes["layer"] == (1 + case.is_recomputed) * passes["model"] > 0
    if case.is_critic:
        if rows == 1 and not case.is_bfloat16:
            found["loss"] = abs(second["critic/value_loss"].value - first["critic/value_loss"].value)
    else:
        if len(mine) > 1:
            assert (second.metrics["tokens/shared_prefix"].total > 0) == (case.layout == "shared")
        total = second.metrics.get("loss/total")
        loss = torch.tensor(0.0 if total is None else total.total, dtype=torch.float64)
        dist.all_reduce(loss)
        found["loss"] = abs(float(loss) / width - first.metrics["loss/total"].total)
    if case.is_bfloat16:  # the float32 masters have the gradient
        return found
    whole = whole_gradients(case, backend, many)
    if dist.get_rank() == 0 or backend == "fsdp":
        # The norms of queries and keys are summed over a row later, before the optimizer uses them.
        later = ("q_norm.weight", "k_norm.weight") if backend == "fsdp" and case.degrees.tensor_parallel > 1 else ()
        own = {n: p.grad for n, p in one.backend.model.named_parameters() if p.grad is not None}
        own, whole = ({n: g for n, g in grads.items() if not n.endswith(later)} for grads in (own, whole))
        found |= {"gradient": difference(own, whole), "largest": max(float(g.abs().max()) for g in own.values())}
    if backend == "megatron":
        many.forward_backward(share, coefs=coefs)
    return found


def compare(case, backend, device):
    """Return the differences of two optimizer steps on the ranks and in one process: in scores, loss, gradient, its norm,
    the weights for engines and the states that both save. Behind the first step the ranks continue from the state of the one
    process, so that the second shows whether it is whole."""
    row, rows, _ = row_of(case, backend)
    torch.manual_seed(0)
    base = base_of(case, device)
    model = base if case.lora is None else adapted(copy.deepcopy(base), case.lora)
    one = make(case, prepared(case, copy.deepcopy(model)))
    many, found = begin(case, backend, base, device)
    first, whole = own_weights(one), whole_of(many.backend)
    if dist.get_rank() == 0:
        found["begins"] = difference(first, whole)
    if backend == "megatron" and not case.is_critic:
        found |= moved(many, base, samples_of(case, 5, 4), list(range(row, 4, rows)))
    norm = "critic/grad_norm" if case.is_critic else "loss/grad_norm"
    # At last all tokens go to two experts, so that other ranks get none, and the second rank has no token to train on.
    is_last = backend == "fsdp" and case.degrees.expert_parallel > 1
    for step, size in enumerate((5, 4, 4) if is_last else (5, 4)):
        routes_to = [None, case.num_experts, 2][step] if case.kind in EXPERTS else None
        samples = samples_of(case, 3 + step, size, routes_to=routes_to)
        if step == 2:
            samples[1::rows] = [s.replace(loss_weights=s.loss_weights * 0) for s in samples[1::rows]]
        mine = list(range(row, len(samples), rows))
        if backend == "fsdp" and step == 1 and case.degrees.context_parallel == 1:
            mine = list(range(len(samples))) if row == 0 else []  # the others have none
        passed = trained_alike(case, backend, one, many, samples, mine)
        found |= {f"{step}/{what}": value for what, value in passed.items()}
        with counted_calls() as calls:
            a, b = one.optim_step(), many.optim_step()
        if backend == "megatron":
            found[f"{step}/calls"] = calls.total()
        found[f"{step}/norm"] = abs(a[norm].value - b[norm].value)
        own, whole = own_weights(one), whole_of(many.backend)
        if dist.get_rank() == 0:
            found[f"{step}/weights"] = difference(own, whole)
        theirs, ours = stored_by_all(one), stored_by_all(many)
        found[f"{step}/state"] = difference(tensors_in(theirs), tensors_in(ours))
        if step == 0:
            found["written"] = sum(file.stat().st_size for file in ours.glob(f"__{dist.get_rank()}_*.distcp"))
            found["written"] /= sum(file.stat().st_size for file in ours.glob("*.distcp"))
            many = make(case, prepared(case, copy.deepcopy(model)), placement_of(case, backend, device))
            many.load(theirs)
            found["loaded"] = difference(tensors_in(theirs), tensors_in(stored_by_all(many)))
            back = make(case, copy.deepcopy(model))
            back.load(ours)
            found["back"] = difference(tensors_in(ours), tensors_in(stored_by_all(back)))
    return found


def measure(out, backend, *how):
    """Write the results of every rank: of the "short" cases, the "long" ones, or those that `how` names; "cuda" runs them on
    GPUs."""
    warnings.simplefilter("ignore")
    device = torch.device("cuda", dist.get_rank()) if "cuda" in how else torch.device("cpu")
    if "cuda" in how:
        torch.cuda.set_device(device)
    elif backend == "megatron":
        pretend()
    every = {}
    for name, case in CASES[backend].items():
        if case.ranks != dist.get_world_size() or not {name, "short" if case.is_short else "long"} & set(how):
            continue
        found = [None] * dist.get_world_size()
        dist.all_gather_object(found, compare(case, backend, device))
        every[name] = found
        if backend == "megatron":
            from megatron.core import parallel_state

            parallel_state.destroy_model_parallel()
    if dist.get_rank() == 0:
        out.write_text(json.dumps(every))

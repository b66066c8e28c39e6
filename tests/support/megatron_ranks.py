"""What test_megatron.py runs on each rank: a policy of megatron-core beside one of one process, and how far they differ."""

import collections
import contextlib
import copy
import functools
import itertools
import json
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

from polyturn.algorithms.aggregate import loss_coefs
from polyturn.algorithms.options import AlgorithmOptions, KlOptions, RoutingOptions
from polyturn.batching.layout import LayoutSettings
from polyturn.core.errors import AlignmentError
from polyturn.core.sample import SampleId, TrainSample
from polyturn.training.backend import Degrees
from polyturn.training.critic import Critic, CriticSettings, critic_backend, local_critic, value_coefs
from polyturn.training.hf import checkpoint_activations, load_unread
from polyturn.training.lora import adapter_tensors, add_lora
from polyturn.training.loss_terms import LossSettings
from polyturn.training.options import LoraSettings, OptimSettings
from polyturn.training.policy import ModelPolicy, local_policy, policy_backend
from support.megatron_cpu import pretend
from support.models import tiny_model
from support.states import stored, tensors_in

VOCAB = 48
LAYERS = 2

SCALED = {
    "rope_parameters": {
        "rope_type": "llama3",
        "rope_theta": 500.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
    }
}


PACKED = LayoutSettings(max_tokens_per_batch=60, packed=True, shared_prefix=True, min_saving=0.0, min_shared=2)


def samples_of(seed, size, *, routed=False, shared=0):
    """Samples of uneven lengths, so that rows are padded, the first `shared` tokens alike; `routed` ones went to experts by
    chance, or nobody knows where."""
    common = np.random.default_rng(0)
    ids_alike, routes_alike = common.integers(0, VOCAB, shared), common.integers(0, 4, (shared, LAYERS, 2))
    routes_alike[..., 1] += 4  # two experts that differ
    rng = np.random.default_rng(seed)
    out = []
    for i in range(size):
        n = int(rng.integers(4 + shared, 24))
        weights = rng.choice([0.0, 0.5, 1.0], size=n).astype(np.float32)
        weights[0], weights[-1] = 0.0, 1.0
        routes = np.stack([[rng.permutation(8)[:2] for _ in range(LAYERS)] for _ in range(n)]).astype(np.uint8)
        routes[rng.random(n) < 0.2] = 255
        ids = rng.integers(0, VOCAB, n).astype(np.int32)
        ids[:shared], routes[:shared] = ids_alike, routes_alike
        out.append(
            TrainSample(
                id=SampleId("g", str(i), 0),
                token_ids=ids,
                loss_weights=weights,
                turn_ids=np.zeros(n, np.int32),
                temperature=0.7,
                old_logprobs=rng.normal(-3.8, 0.3, n).astype(np.float32),
                advantages=rng.normal(size=n).astype(np.float32),
                routed_experts=routes if routed else None,
            )
        )
    return out


def largest(pairs):
    return max((float(np.abs(np.asarray(a) - np.asarray(b)).max()) for a, b in pairs), default=0.0)


def difference(one, many):
    """Compare tensors of the same names."""
    assert one.keys() == many.keys(), one.keys() ^ many.keys()
    return max(float((one[name].cpu() - many[name].cpu()).abs().max()) for name in one)


NUMBERS = itertools.count()


def stored_by_all(made):
    """Save what every rank has, or has a part of, and return the folder, which always has one name: each new one would be
    another group of the ranks."""
    return stored(made, Path.cwd() / f"{dist.get_world_size()}-{next(NUMBERS)}" / "state")


def whole_of(backend):
    """Return the whole weights on the first rank, and None on others."""
    return backend.gathered(list(backend.kinds(is_merged=True)), is_merged=True)


def own_weights(backend):
    """Return what one process gives to an engine: an adapter merged, of tied weights the first."""
    weights = backend.weights()
    return {name: weights[name] for name in backend.network.own_tensors()}


def moved(many, model, samples, share):
    """Return how far scores are from those of one process with the same weights, when every group was moved, and back;
    `model` has no adapter, which is merged there.

    Ranks that hold the same move it alike, which is what this shows.
    """
    backend, found = many.backend, {}
    before = whole_of(backend)
    for group in backend.weight_groups():
        backend.shift_weights(group, 0.1)
    there = [whole_of(backend)]
    dist.broadcast_object_list(there, src=0)
    other = local_policy(copy.deepcopy(model), optim=OptimSettings())
    other.backend.take({name: tensor.to(model.device) for name, tensor in there[0].items()})
    a, b = other.score(samples), many.score([samples[i] for i in share])
    found["moved/scores"] = largest([(a[i], b[k]) for k, i in enumerate(share)])
    for group in backend.weight_groups():
        backend.shift_weights(group, 0.0)
    after = whole_of(backend)
    if dist.get_rank() == 0:
        found["moved/largest"] = difference(before, there[0])
        found["moved/back"] = difference(before, after)
    return found


def adapted(model, targets):
    """Return the model with an adapter that is not 0."""
    add_lora(model, LoraSettings(rank=3, alpha=6.0, target_modules=targets), seed=1)
    with torch.no_grad():
        for number, tensor in enumerate(adapter_tensors(model).values()):
            tensor.normal_(0, 0.2, generator=torch.Generator().manual_seed(number))
    return model


def model_of(kind, *, tied, device):
    # FlexAttention, which attends on a GPU where rows stand end to end, knows no head below 16.
    hidden = 64 if device.type == "cuda" else 16
    model = tiny_model(VOCAB, kind=kind, hidden=hidden, layers=LAYERS, heads=4, kv_heads=2, spread=0.1, seed=0)
    if tied:
        return model.to(device)
    own = {**model.config.to_dict(), "tie_word_embeddings": False, **(SCALED if kind == "llama" else {})}
    return type(model)(type(model.config)(**own)).float().eval().to(device)


def read_from(folder, plain, lora, *, split, device):
    """Return the whole weights of a policy whose ranks read their parts of a folder, and the share that this one read."""
    from polyturn.training import megatron

    if dist.get_rank() == 0:
        plain.save_pretrained(folder)
    dist.barrier()
    read, counted = megatron.read_weights, []
    megatron.read_weights = lambda *args, **options: counted.append(read(*args, **options))
    try:
        unread = load_unread(folder)
        model = unread if lora is None else adapted(unread, lora)
        backend = policy_backend(model, placement=megatron.Megatron(split, device), optim=OptimSettings())
    finally:
        megatron.read_weights = read
    return whole_of(backend), counted[0] / (folder / "model.safetensors").stat().st_size


def gradient_difference(one, many):
    """Return how far the gradients of one process and of the ranks differ, and the largest number; the latter is cleared."""
    backend, found = many.backend, {}
    optimizer, names = backend.optimizer, backend.network.names
    optimizer._total_norm([p for _, p in optimizer._named])
    grads = {n: optimizer._as_rows(n, p.grad).full_tensor() for n, p in optimizer._named}
    gradient = {name: names.whole(grads, name) for name in names.kinds(grads)}
    if dist.get_rank() == 0:
        own = {n: p.grad for n, p in one.backend.model.named_parameters() if p.requires_grad}
        found["gradient"] = difference(own, gradient)
        found["largest"] = max(float(g.abs().max()) for g in own.values())
    optimizer.zero_grad()
    return found


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


def compare_values(kind, *, device, tied=True, **degrees):
    """Return how far a critic over the ranks and one of one process differ in values, loss, gradient, two steps, and a state
    that travels between them; it begins with the weights of a policy of the ranks, or of a model.

    The last is a state in bfloat16, of which only the head has no masters.
    """
    from polyturn.training.megatron import Megatron

    split, found = Degrees(**degrees), {}
    width = split.tensor_parallel * split.pipeline_parallel * split.context_parallel
    row, rows = dist.get_rank() // width, dist.get_world_size() // width
    options = {
        "optim": OptimSettings(lr=1e-2, max_grad_norm=0.1, weight_decay=0.1),
        "settings": CriticSettings(clip=0.2),
        "layout": LayoutSettings(max_tokens_per_batch=40),
    }

    def over_ranks(model, start=None):
        placement, layout = Megatron(split, device, start=start), PACKED if split.context_parallel > 1 else options["layout"]
        backend = critic_backend(copy.deepcopy(model), placement=placement, **options | {"layout": layout})
        return Critic(backend, settings=options["settings"])

    model = model_of(kind, tied=tied, device=device)
    policy = policy_backend(copy.deepcopy(model), placement=Megatron(split, device), optim=options["optim"])
    one, many, other = local_critic(copy.deepcopy(model), **options), over_ranks(model, policy.held()), over_ranks(model)
    for name, made in (("of_policy", many), ("of_model", other)):
        whole = whole_of(made.backend)
        if dist.get_rank() == 0:
            found[name] = difference(one.backend.network.own_tensors(), whole)
    for name, seed, size in (("first", 3, 5), ("second", 4, 4)):
        rng, mine = np.random.default_rng(seed), list(range(row, size, rows))
        samples = [s.replace(returns=rng.normal(size=len(s))) for s in samples_of(seed, size)]
        a, b = one.score(samples), many.score([samples[i] for i in mine])
        found[f"{name}/scores"] = largest([(a[i], b[k]) for k, i in enumerate(mine)])
        samples = [s.replace(values=v) for s, v in zip(samples, a, strict=True)]
        share, coefs = [samples[i] for i in mine], value_coefs(samples)
        first = one.forward_backward(samples)
        second = many.forward_backward(share, coefs=[coefs[i] for i in mine])
        if rows == 1:
            found[f"{name}/loss"] = abs(second["critic/value_loss"].value - first["critic/value_loss"].value)
        found |= {f"{name}/{what}": value for what, value in gradient_difference(one, many).items()}
        many.forward_backward(share, coefs=[coefs[i] for i in mine])
        a, b = one.optim_step(), many.optim_step()
        found[f"{name}/norm"] = abs(a["critic/grad_norm"].value - b["critic/grad_norm"].value)
        theirs, ours = stored_by_all(one), stored_by_all(many)
        found[f"{name}/state"] = difference(tensors_in(theirs), tensors_in(ours))
        many.load(theirs)
        found[f"{name}/loaded"] = difference(tensors_in(theirs), tensors_in(stored_by_all(many)))
    low, alone = over_ranks(model.bfloat16()), local_critic(copy.deepcopy(model), **options)
    for made, given in ((alone, samples), (low, share)):
        made.forward_backward(given, coefs=value_coefs(samples)[: len(given)])
        made.optim_step()
    found["low/state"] = difference(tensors_in(stored_by_all(alone)), tensors_in(stored_by_all(low)))
    return found


def compare(kind, *, device, is_long, tied=True, lora=None, shared=0, recomputed=False, **degrees):
    """Return how far the ranks and one process differ in scores, loss, gradient, a step and a state that travels.

    Where samples have their first `shared` tokens in common, or their tokens are split, those of the ranks stand end to end,
    with their prefixes once.
    It travels behind the first step, so that the second shows whether training goes on from it; in the long form, and with
    an adapter of the modules `lora`, it is also read again behind each.
    """
    from polyturn.training.megatron import Megatron

    split = Degrees(**degrees)
    width = split.tensor_parallel * split.pipeline_parallel * split.context_parallel
    row, rows = dist.get_rank() // width, dist.get_world_size() // width
    torch.manual_seed(0)
    options = {
        "optim": OptimSettings(lr=1e-2, max_grad_norm=0.1, weight_decay=0.1, max_skipped=1),
        "loss": LossSettings(
            algorithm=AlgorithmOptions(
                kl=KlOptions(coef=0.1),
                entropy_coef=0.01,
                routing=RoutingOptions(balance_coef=0.5 if kind == "qwen3_moe" else 0.0),
            ),
            policy_loss_kwargs={"clip_high": 0.28},
        ),
        "layout": LayoutSettings(max_tokens_per_batch=40),
        "reference": True,
    }
    over_ranks = options | ({"layout": PACKED} if shared or split.context_parallel > 1 else {})
    plain = model_of(kind, tied=tied, device=device)
    model = plain if lora is None else adapted(copy.deepcopy(plain), lora)
    if recomputed:
        checkpoint_activations(model)
    is_long = is_long or lora is not None
    one = local_policy(copy.deepcopy(model), **options)
    backend = policy_backend(copy.deepcopy(model), placement=Megatron(split, device), **over_ranks)
    many = ModelPolicy(backend, loss=options["loss"])
    found = {}
    first, whole = own_weights(one.backend), whole_of(backend)
    if dist.get_rank() == 0:
        found["round_trip"] = difference(first, whole)
    whole, found["read/share"] = read_from(Path.cwd() / f"model-{next(NUMBERS)}", plain, lora, split=split, device=device)
    if dist.get_rank() == 0:
        found["read"] = difference(first, whole)
    found |= moved(many, plain, samples_of(5, 4, shared=shared), list(range(row, 4, rows)))
    for name, seed, size in (("first", 3, 5), ("second", 4, 4)):
        samples = samples_of(seed, size, routed=kind == "qwen3_moe" and name == "second", shared=shared)
        coefs = loss_coefs(samples, mode="token-mean")
        mine = list(range(row, size, rows))
        share = [samples[i] for i in mine]
        for reference in (False, True):
            a, b = one.score(samples, reference=reference), many.score(share, reference=reference)
            found[f"{name}/scores_{reference}"] = largest([(a[i], b[k]) for k, i in enumerate(mine)])
        ref = one.score(samples, reference=True)
        samples = [s.replace(ref_logprobs=r) for s, r in zip(samples, ref, strict=True)]
        share = [samples[i] for i in mine]
        if samples[0].routed_experts is not None:
            other = [s.replace(routed_experts=s.routed_experts[:, :1]) for s in share]
            with pytest.raises(AlignmentError, match="train the model that was sampled from"):
                many.forward_backward(other, coefs=[coefs[i] for i in mine])
        first = one.forward_backward(samples)
        with layer_passes(backend.network.saved.decoder) as passes:
            second = many.forward_backward(share, coefs=[coefs[i] for i in mine])
        assert passes["layer"] == (1 + recomputed) * passes["model"] > 0
        if len(mine) > 1:
            assert (second.metrics["tokens/shared_prefix"].total > 0) == (shared > 0)
        loss = torch.tensor(second.metrics["loss/total"].total)
        if rows > 1:
            dist.all_reduce(loss)
            loss /= width
        found[f"{name}/loss"] = abs(float(loss) - first.metrics["loss/total"].total)
        found |= {f"{name}/{what}": value for what, value in gradient_difference(one, many).items()}
        many.forward_backward(share, coefs=[coefs[i] for i in mine])
        a, b = one.optim_step(), many.optim_step()
        found[f"{name}/norm"] = abs(a["loss/grad_norm"].value - b["loss/grad_norm"].value)
        whole, own = whole_of(backend), own_weights(one.backend)
        if dist.get_rank() == 0:
            found[f"{name}/weights"] = difference(own, whole)
        if name == "first" or is_long:
            theirs, ours = stored_by_all(one), stored_by_all(many)
            found[f"{name}/state"] = difference(tensors_in(theirs), tensors_in(ours))
            many.load(theirs)
        if is_long:
            back = local_policy(copy.deepcopy(model), **options)
            back.load(ours)
            found[f"{name}/back"] = difference(tensors_in(ours), tensors_in(stored_by_all(back)))
            found[f"{name}/resumed"] = difference(tensors_in(theirs), tensors_in(stored_by_all(many)))
    backend.take(model.state_dict())
    whole, first = whole_of(backend), own_weights(local_policy(model, optim=options["optim"]).backend)
    if dist.get_rank() == 0:
        found["taken"] = difference(first, whole)
    return found


TASKS = {
    1: {
        "dense": {"kind": "qwen3"},
        "moe": {"kind": "qwen3_moe"},
        "qwen2": {"kind": "qwen2"},
        "llama": {"kind": "llama", "tied": False},
    },
    2: {
        "tensor": {"kind": "qwen3", "tensor_parallel": 2, "shared": 5},
        "expert": {"kind": "qwen3_moe", "expert_parallel": 2},
        "pipeline": {"kind": "qwen3", "pipeline_parallel": 2},
        "context": {"kind": "qwen3", "context_parallel": 2, "shared": 5},
        "data": {"kind": "llama", "tied": False},
        "tensor_moe": {"kind": "qwen3_moe", "tensor_parallel": 2, "expert_parallel": 2},
        "tensor_qwen2": {"kind": "qwen2", "tensor_parallel": 2, "tied": False},
        "pipeline_moe": {"kind": "qwen3_moe", "pipeline_parallel": 2, "tied": False, "shared": 5, "recomputed": True},
        "lora_tensor": {"kind": "qwen2", "tensor_parallel": 2, "lora": "all-linear", "shared": 5, "recomputed": True},
        "lora_pipeline": {"kind": "qwen3", "pipeline_parallel": 2, "lora": ["q_proj", "v_proj", "up_proj"], "tied": False},
        "context_moe": {
            **{
                "kind": "qwen3_moe",
                "context_parallel": 2,
                "expert_parallel": 2,
                "tied": False,
                "shared": 5,
                "recomputed": True,
            }
        },
        "lora_moe": {"kind": "qwen3_moe", "tensor_parallel": 2, "expert_parallel": 2, "lora": ["q_proj", "o_proj"]},
        "lora_context": {"kind": "qwen2", "context_parallel": 2, "lora": "all-linear"},
    },
    4: {
        "rows_of_tensor": {"kind": "qwen3_moe", "tensor_parallel": 2, "expert_parallel": 2, "shared": 5},
        "rows_of_stages": {"kind": "qwen2", "pipeline_parallel": 2},
        "rows_of_context": {"kind": "llama", "context_parallel": 2, "tied": False, "shared": 5},
        "context_tensor": {"kind": "qwen3", "context_parallel": 2, "tensor_parallel": 2, "shared": 5},
        "context_tensor_moe": {
            **{"kind": "qwen3_moe", "context_parallel": 2, "tensor_parallel": 2, "expert_parallel": 4, "shared": 5}
        },
        "context_stages": {
            **{"kind": "qwen3_moe", "context_parallel": 2, "pipeline_parallel": 2, "expert_parallel": 2, "shared": 5}
        },
        "context_of_four": {"kind": "qwen3", "context_parallel": 4, "shared": 5},
    },
}
"""World size -> name -> what `compare` is given; those of two ranks have every kind of model."""
SHORT = ("data", "tensor_moe", "pipeline_moe", "context_moe", "lora_tensor", "lora_pipeline")
"""Those of two ranks that `make test` compares; they split whatever the others split."""
VALUES = {
    1: {},
    2: {
        "values_tensor": {"kind": "qwen3", "tensor_parallel": 2},
        "values_pipeline": {"kind": "qwen2", "pipeline_parallel": 2},
        "values_context": {"kind": "qwen3", "context_parallel": 2},
    },
    4: {
        "values_context_tensor": {"kind": "qwen3", "context_parallel": 2, "tensor_parallel": 2},
        "values_context_stages": {"kind": "qwen2", "context_parallel": 2, "pipeline_parallel": 2},
    },
}
"""The same of `compare_values`."""


def measure(out, *how):
    """Write the results of every rank; `how` may hold "cuda", "long", and names of comparisons, to make those alone."""
    warnings.simplefilter("ignore")
    device = torch.device("cuda", dist.get_rank()) if "cuda" in how else torch.device("cpu")
    if "cuda" in how:
        torch.cuda.set_device(device)
    else:
        pretend()
    from megatron.core import parallel_state

    every, only = {}, set(how) - {"cuda", "long"}
    policies = functools.partial(compare, is_long="long" in how)
    for call, tasks in ((policies, TASKS), (compare_values, VALUES)):
        for name, task in tasks[dist.get_world_size()].items():
            if (not how and tasks is TASKS and name not in SHORT) or (only and name not in only):
                continue
            found = [None] * dist.get_world_size()
            dist.all_gather_object(found, call(**task, device=device))
            parallel_state.destroy_model_parallel()
            every[name] = found
    if dist.get_rank() == 0:
        out.write_text(json.dumps(every))

"""What test_fsdp.py runs on each of two ranks: a policy over shards beside one of one process, and how far they differ."""

import asyncio
import contextlib
import copy
import dataclasses
import functools
import itertools
import json
import shutil
import time
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from PIL import Image
from safetensors.torch import load_file, save_file
from torch.distributed.fsdp import fully_shard
from transformers import GPT2Config, GPT2LMHeadModel
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from polyturn.algorithms.aggregate import loss_coefs
from polyturn.algorithms.losses import mark, policy_losses, selection_of
from polyturn.algorithms.options import AlgorithmOptions, DistillSettings, KlOptions, RoutingOptions
from polyturn.batching.layout import LayoutSettings
from polyturn.core.errors import PolyturnError
from polyturn.core.messages import Message
from polyturn.core.metrics import Mean
from polyturn.core.sample import SampleId, TrainSample
from polyturn.engines.embedded import EmbeddedEngine
from polyturn.tokens.codec import Codec
from polyturn.tokens.multimodal import MediaProcessor
from polyturn.training.backend import Degrees
from polyturn.training.critic import Critic, CriticSettings, critic_backend, local_critic, value_coefs
from polyturn.training.fsdp import Sharded
from polyturn.training.fsdp import make_mesh as new_mesh
from polyturn.training.hf import checkpoint_activations, load_model, load_unread
from polyturn.training.lora import LoraSettings, adapter_tensors, add_lora
from polyturn.training.loss_terms import LossSettings
from polyturn.training.optim import OptimSettings
from polyturn.training.part_loading import read_weights
from polyturn.training.policy import ModelPolicy, local_policy, policy_backend
from polyturn.training.process_group import ProcessRankGroup, follow
from polyturn.training.rank_group import RankWorker, assign
from polyturn.training.ranked import RankedBackend
from polyturn.training.shards import inside, local_part, whole_tensor
from polyturn.training.weight_probe import WeightProbe
from polyturn.training.weight_shifts import groups_of
from polyturn.training.weight_sync import WeightSync
from support.models import tiny_model
from support.states import stored, tensors_in
from support.vision import tiny_processor, tiny_vision_model, vision_tokenizer

VOCAB = 48
CPU = torch.device("cpu")
ALGORITHM = AlgorithmOptions(kl=KlOptions(coef=0.1), entropy_coef=0.01)
DISTILL = DistillSettings(teacher="teacher", coef=0.1)


make_mesh = functools.cache(new_mesh)
"""One for each way of splitting, because its groups of ranks have threads that never sleep for long."""


def exact_model(seed=0, layers=2):
    """A tiny Qwen3 in float64; transformers' own norms round to float32, which would hide small differences."""
    model = tiny_model(VOCAB, hidden=16, layers=layers, heads=2, kv_heads=2, seed=seed)
    for name, norm in [(n, m) for n, m in model.named_modules() if isinstance(m, Qwen3RMSNorm)]:
        parent, _, attribute = name.rpartition(".")
        setattr(model.get_submodule(parent), attribute, torch.nn.RMSNorm(len(norm.weight), eps=norm.variance_epsilon))
    return model.double()


def samples_of(seed, size):
    rng = np.random.default_rng(seed)
    out = []
    for i in range(size):
        n = int(rng.integers(4, 24))
        weights = rng.choice([0.0, 0.5, 1.0], size=n).astype(np.float32)
        weights[0], weights[-1] = 0.0, 1.0
        out.append(
            TrainSample(
                id=SampleId("g", str(i), 0),
                token_ids=rng.integers(0, VOCAB, n).astype(np.int32),
                loss_weights=weights,
                turn_ids=np.zeros(n, np.int32),
                old_logprobs=rng.normal(-3.8, 0.3, n).astype(np.float32),
                ref_logprobs=rng.normal(-3.8, 0.3, n).astype(np.float32),
                advantages=rng.normal(size=n).astype(np.float32),
            )
        )
    return out


def sharded_policy(model, mesh, **options):
    """A policy of this rank, over its shards; its calls are collective."""
    backend = policy_backend(model, placement=Sharded(mesh, CPU), **options)
    return ModelPolicy(backend, loss=options.get("loss"))


def sharded_critic(model, mesh, *, settings=None, **options):
    return Critic(critic_backend(model, placement=Sharded(mesh, CPU), settings=settings, **options), settings=settings)


def first_weights(model):
    """The state of a critic over the backbone of `model`, before it has learnt anything."""
    head = torch.zeros(1, model.config.hidden_size, dtype=torch.promote_types(model.dtype, torch.float32))
    backbone = {f"backbone.{name}": tensor for name, tensor in model.base_model.state_dict().items()}
    return {**backbone, "head.weight": head, "head.bias": torch.zeros(1, dtype=head.dtype)}


def unowned_bytes(tensors):
    """Return how many bytes of other parts, such as the whole of a file, are kept in memory for those of this rank."""
    return sum(part.untyped_storage().nbytes() - part.nbytes for part in map(local_part, tensors))


NUMBERS = itertools.count()


def stored_by_all(made):
    """Save what every rank has, or has a part of, and return the folder, which always has one name: each new one would be
    another group of the ranks."""
    return stored(made, Path.cwd() / str(next(NUMBERS)) / "state")


def state_of(made):
    """Return what `made` saves as whole tensors."""
    return dict(tensors_in(stored_by_all(made)))


def trained_of(made):
    """Return what training changes as whole tensors on rank 0, None on others."""
    return made.backend.gathered(list(made.backend.kinds(False)), False)


def hand_over(one, other):
    """Let `other` go on from what `one` saves."""
    other.load(stored_by_all(one))


def largest(pairs):
    return max((float(np.abs(np.asarray(a) - np.asarray(b)).max()) for a, b in pairs), default=0.0)


def same_parts(one, many):
    """Compare two states of the same nesting, tensor for tensor."""
    if isinstance(one, torch.Tensor):
        return float((one - many).abs().max()) if one.numel() else 0.0
    if isinstance(one, dict):
        return max((same_parts(one[k], many[k]) for k in one), default=0.0)
    if isinstance(one, list | tuple):
        return max((same_parts(a, b) for a, b in zip(one, many, strict=True)), default=0.0)
    return 0.0


def compare(tp):
    """Return how far two ranks and one process differ, the layers split over a row of `tp` ranks."""
    mesh = make_mesh(CPU, tensor_parallel=tp)
    row, rows = dist.get_rank() // tp, dist.get_world_size() // tp
    options = {
        "optim": OptimSettings(lr=1e-2, max_grad_norm=0.1, max_skipped=1),
        "loss": LossSettings(policy_loss_kwargs={"clip_high": 0.28}, distill=DISTILL, algorithm=ALGORITHM),
        "layout": LayoutSettings(max_tokens_per_batch=20),
        "reference": True,
    }
    model = exact_model()
    one = local_policy(copy.deepcopy(model), teacher=exact_model(1), **options)
    many = sharded_policy(copy.deepcopy(model), mesh, teacher=exact_model(1), **options)
    found = {}
    for name, size, last in (("uneven", 3, 0), ("idle_rank", 2, rows)):
        samples = samples_of(len(name), size)
        coefs = loss_coefs(samples, mode="token-mean")
        mine = [i for i in range(size) if i % rows == row] if not last else [i for i in range(size) if row == 0]
        share = [samples[i] for i in mine]
        for reference in (False, True):
            a, b = one.score(samples, reference=reference), many.score(share, reference=reference)
            found[f"{name}/score{reference}"] = largest([(a[i], b[k]) for k, i in enumerate(mine)])
        one.forward_backward(samples)
        many.forward_backward(share, coefs=[coefs[i] for i in mine])
        whole = {n: p.grad.full_tensor() for n, p in many.backend.model.named_parameters()}
        # The norms of queries and keys are summed over a row later, before the optimizer uses them.
        names = [n for n in whole if tp == 1 or not n.endswith(("q_norm.weight", "k_norm.weight"))]
        grads = {n: p.grad for n, p in one.backend.model.named_parameters()}
        found[f"{name}/gradient"] = max(float((grads[n] - whole[n]).abs().max()) for n in names)
        norms = [policy.optim_step()["loss/grad_norm"].value for policy in (one, many)]
        found[f"{name}/norm"] = abs(norms[0] - norms[1])
        assert norms[0] > 0.1  # so that clipping is compared too
    found["state"] = same_parts(state_of(one), state_of(many))
    sizes = [file.stat().st_size for file in stored_by_all(many).glob("*.distcp")]
    found["written"] = [size / sum(sizes) for size in sizes]
    fresh = sharded_policy(exact_model(), mesh, teacher=exact_model(1), **options)
    hand_over(one, fresh)
    found["loaded"] = same_parts(state_of(one), state_of(fresh))
    back = local_policy(exact_model(2), teacher=exact_model(1), **options)
    hand_over(fresh, back)
    found["back"] = same_parts(state_of(one), state_of(back))
    # A loss that is not finite on one rank alone.
    samples = samples_of(7, 2 * rows)
    bad = samples[0].replace(advantages=np.full(len(samples[0]), np.nan, np.float32))
    before = trained_of(many)
    share = [bad if i == 0 else samples[i] for i in range(len(samples)) if i % rows == row]
    many.forward_backward(share, coefs=[np.full(len(s), 0.1, np.float32) for s in share])
    found["skipped"] = many.optim_step()["loss/skipped_steps"].value
    after = trained_of(many)
    if dist.get_rank() == 0:
        found["skipped_changed"] = same_parts(before, after)
    # Then a gradient that is not, on one rank alone, while the loss is: one bad step more than are skipped.
    many.forward_backward([samples[row]], coefs=[np.full(len(samples[row]), 0.1, np.float32)])
    if dist.get_rank() == 1:
        local_part(next(p.grad for p in many.backend.model.parameters() if p.grad is not None)).fill_(torch.inf)
    found["ended"] = error_of_all(many.optim_step)
    return found


def error_of_all(action):
    """Return what `action` raises, which must be something of ours on every rank."""
    try:
        action()
    except PolyturnError as problem:
        said = str(problem)
    else:
        said = None
    every = [None] * dist.get_world_size()
    dist.all_gather_object(every, said)
    assert None not in every, every
    return every


def compare_critic(tp):
    """Return how far a critic over two ranks and one of one process differ, the layers split over a row of `tp` ranks."""
    mesh = make_mesh(CPU, tensor_parallel=tp)
    row, rows = dist.get_rank() // tp, dist.get_world_size() // tp
    options = {
        "optim": OptimSettings(lr=1e-2, max_grad_norm=0.1, max_skipped=1),
        "settings": CriticSettings(clip=0.2),
        "layout": LayoutSettings(max_tokens_per_batch=20),
    }
    model = exact_model(layers=1)
    one = local_critic(copy.deepcopy(model), **options)
    many = sharded_critic(exact_model(layers=1), mesh, **options)
    many.backend.take(first_weights(model))
    found = {}
    for step, (size, last) in enumerate(((5, 0), (2, rows))):
        rng = np.random.default_rng(step)
        samples = [s.replace(returns=rng.normal(size=len(s))) for s in samples_of(step, size)]
        mine = [i for i in range(size) if i % rows == row] if not last else [i for i in range(size) if row == 0]
        share = [samples[i] for i in mine]
        a, b = one.score(samples), many.score(share)
        found[f"{step}/score"] = largest([(a[i], b[k]) for k, i in enumerate(mine)])
        samples = [s.replace(values=v) for s, v in zip(samples, a, strict=True)]
        coefs = value_coefs(samples)
        one.forward_backward(samples)
        many.forward_backward([samples[i] for i in mine], coefs=[coefs[i] for i in mine])
        whole = {n: p.grad.full_tensor() for n, p in many.backend.model.named_parameters()}
        names = [n for n in whole if tp == 1 or not n.endswith(("q_norm.weight", "k_norm.weight"))]
        grads = {n: p.grad for n, p in one.backend.model.named_parameters()}
        assert max(float(g.abs().max()) for n, g in grads.items()) > 1e-3
        found[f"{step}/gradient"] = max(float((grads[n] - whole[n]).abs().max()) for n in names)
        norms = [made.optim_step()["critic/grad_norm"].value for made in (one, many)]
        found[f"{step}/norm"] = abs(norms[0] - norms[1])
    state = state_of(many)
    fresh = sharded_critic(exact_model(layers=1), mesh, **options)
    hand_over(one, fresh)
    found["state"] = same_parts(state_of(one), state)
    found["loaded"] = same_parts(state_of(one), state_of(fresh))
    share = [samples[0].replace(returns=np.full(len(samples[0]), np.inf))] if row == 0 else [samples[1]]
    for _ in range(2):
        many.forward_backward(share, coefs=[np.full(len(s), 0.1) for s in share])
        if "skipped" in found:
            found["ended"] = error_of_all(many.optim_step)
        else:
            found["skipped"] = many.optim_step()["critic/skipped_steps"].value
    found["skipped_changed"] = same_parts(inside(state, "model/"), inside(state_of(many), "model/"))
    other = local_critic(tiny_model(VOCAB, hidden=32, layers=1), **options)
    found["refused"] = error_of_all(lambda: hand_over(other, many))
    policy = sharded_policy(exact_model(layers=1), mesh, optim=options["optim"])
    found["together"] = same_parts(state_of(many), dict(tensors_in(written_together({"policy": policy, "critic": many}))))
    return found


def written_together(made):
    """Write several states at the same time, on each rank in another order, and return the folder of the last."""
    folder = Path.cwd() / f"together-{next(NUMBERS)}"
    for first in ("alone", "together"):
        names = sorted(made, reverse=first == "together" and dist.get_rank() == 1)
        for name in names:
            made[name].save(folder / first / name)
            while first == "alone" and not made[name].is_saved():
                time.sleep(0.01)
    while not all(one.is_saved() for one in made.values()):
        time.sleep(0.01)
    return folder / "together" / "critic"


def compare_bfloat16():
    """Return how far two ranks and one process are apart, in bfloat16, that begin with weights which were loaded."""
    options = {"optim": OptimSettings(lr=1e-3, max_grad_norm=None), "layout": LayoutSettings(max_tokens_per_batch=20)}
    start = tiny_model(VOCAB, hidden=16, layers=1, heads=2, kv_heads=2, seed=3).bfloat16()
    one = local_policy(copy.deepcopy(start), **options)
    many = sharded_policy(exact_model(layers=1).bfloat16(), make_mesh(CPU), **options)
    many.backend.take(start.state_dict())
    samples = samples_of(1, 2)
    coefs = loss_coefs(samples, mode="token-mean")
    one.forward_backward(samples, coefs=coefs)
    rank = dist.get_rank()
    many.forward_backward([samples[rank]], coefs=[coefs[rank]])
    for made in (one, many):
        made.optim_step()
    whole = trained_of(many)
    found = {"policy": same_parts(one.backend.network.tensors(), whole) if rank == 0 else None}
    # The critic, whose head is float32 on a backbone of bfloat16.
    one = local_critic(copy.deepcopy(start), **options)
    many = sharded_critic(exact_model(layers=1).bfloat16(), make_mesh(CPU), **options)
    many.backend.take(first_weights(start))
    samples = [s.replace(values=np.zeros(len(s)), returns=np.ones(len(s))) for s in samples]
    coefs = value_coefs(samples)
    one.forward_backward(samples)
    many.forward_backward([samples[rank]], coefs=[coefs[rank]])
    for made in (one, many):
        made.optim_step()
    found["critic"] = same_parts(inside(state_of(one), "model/"), inside(state_of(many), "model/"))
    return found


def compare_lora(tp):
    """Return how far two ranks, of which rows of `tp` split the layers, and one process differ that train an adapter which
    was not zero at the start."""
    model = exact_model(layers=1)
    add_lora(model, LoraSettings(rank=2, alpha=4))
    torch.manual_seed(1)
    for name, tensor in adapter_tensors(model).items():
        if ".lora_B." in name:
            torch.nn.init.normal_(tensor, std=0.1)
    options = {
        "optim": OptimSettings(lr=1e-2, max_grad_norm=0.1),
        "loss": LossSettings(algorithm=ALGORITHM),
        "layout": LayoutSettings(max_tokens_per_batch=20),
        "reference": True,
    }
    mesh, rank = make_mesh(CPU, tensor_parallel=tp), dist.get_rank()
    row, rows = rank // tp, dist.get_world_size() // tp
    one = local_policy(copy.deepcopy(model), **options)
    many = sharded_policy(copy.deepcopy(model), mesh, **options)
    found = {}
    for step in range(2):
        samples = samples_of(step, 5)
        coefs = loss_coefs(samples, mode="token-mean")
        mine = [i for i in range(5) if i % rows == row]
        share = [samples[i] for i in mine]
        for reference in (False, True):
            a, b = one.score(samples, reference=reference), many.score(share, reference=reference)
            found[f"{step}/score{reference}"] = largest([(a[i], b[k]) for k, i in enumerate(mine)])
        one.forward_backward(samples)
        many.forward_backward(share, coefs=[coefs[i] for i in mine])
        grads = {n: p.grad for n, p in one.backend.model.named_parameters() if p.grad is not None}
        whole = {n: p.grad.full_tensor() for n, p in many.backend.model.named_parameters() if p.grad is not None}
        assert grads.keys() == whole.keys() == adapter_tensors(model).keys()
        assert max(float(g.abs().max()) for g in grads.values()) > 1e-4
        found[f"{step}/gradient"] = max(float((grads[n] - whole[n]).abs().max()) for n in grads)
        norms = [policy.optim_step()["loss/grad_norm"].value for policy in (one, many)]
        found[f"{step}/norm"] = abs(norms[0] - norms[1])
    state, weights = state_of(many), trained_of(many)
    fresh = sharded_policy(copy.deepcopy(model), mesh, **options)
    hand_over(one, fresh)
    found["state"] = same_parts(state_of(one), state)
    found["loaded"] = same_parts(state_of(one), state_of(fresh))
    merged = many.backend.gathered(list(many.backend.kinds(True)), True)
    if rank == 0:
        found["weights"] = same_parts(adapter_tensors(one.backend.model), weights)
        found["merged"] = same_parts(merged, one.weights())
    return found


def compare_dropout():
    """Return how far an adapter's gradient under dropout is from one process's that drops the same, and whether a row's
    ranks have the same of what is whole on each.

    Layers with whole inputs alone: of the others each rank of a row draws for its own columns.
    """
    model, mesh = exact_model(layers=1), make_mesh(CPU, tensor_parallel=2)
    torch.manual_seed(dist.get_rank())  # as of a leader that has drawn more
    targets = ["q_proj", "v_proj", "up_proj"]
    add_lora(model, LoraSettings(rank=2, alpha=4, dropout=0.5, target_modules=targets))
    for name, tensor in adapter_tensors(model).items():
        tensor.add_(0.1 * (".lora_B." in name))
    options = {
        "optim": OptimSettings(lr=1e-2),
        "layout": LayoutSettings(max_tokens_per_batch=400, max_padding_per_batch=400),
    }
    one, placement = local_policy(copy.deepcopy(model), **options), Sharded(mesh, CPU)
    many, samples = ModelPolicy(policy_backend(model, placement=placement, **options)), samples_of(5, 3)
    grads = []
    for made, draws in ((one, placement.drawing(0, 0)), (many, contextlib.nullcontext())):
        with draws:
            made.forward_backward(samples)
        grads.append({n: whole_tensor(p.grad) for n, p in made.backend.model.named_parameters() if p.grad is not None})
    every = [None, None]
    dist.all_gather_object(every, {n: g for n, g in grads[1].items() if ".lora_A." in n})
    return {"gradient": same_parts(*grads), "ranks": same_parts(*every)}


def routed_samples(seed, size, *, layers):
    """Samples that went to experts by chance, or nobody knows where."""
    rng, found = np.random.default_rng(seed), []
    for sample in samples_of(seed, size):
        routes = np.argsort(rng.random((len(sample), layers, 8)), axis=-1)[:, :, :2].astype(np.uint8)
        routes[rng.random(len(sample)) < 0.2] = 255
        found.append(sample.replace(routed_experts=routes))
    return found


def compare_experts(kind, **degrees):
    """Return how far ranks of which a row splits the experts and one process differ, with a balance loss and told routes.

    The ranks read their weights from files that hold each expert by itself.
    """
    degrees = Degrees(**degrees)
    wide, folder = max(degrees.tensor_parallel, degrees.expert_parallel), Path.cwd() / f"{kind}-{next(NUMBERS)}"
    row, rows = dist.get_rank() // wide, dist.get_world_size() // wide
    options = {
        "optim": OptimSettings(lr=1e-2, max_grad_norm=0.1),
        "loss": LossSettings(algorithm=dataclasses.replace(ALGORITHM, routing=RoutingOptions(balance_coef=0.5))),
        "layout": LayoutSettings(max_tokens_per_batch=40),
        "reference": True,
    }
    model = tiny_model(VOCAB, kind=kind, hidden=16, heads=2, kv_heads=2, spread=0.1)
    if dist.get_rank() == 0:
        model.save_pretrained(folder)
        assert any("experts.0." in name for name in load_file(folder / "model.safetensors"))
    dist.barrier()
    one = local_policy(copy.deepcopy(model), **options)
    placement = Sharded(make_mesh(CPU, tensor_parallel=wide), CPU, degrees=degrees)
    many = ModelPolicy(policy_backend(load_unread(folder), placement=placement, **options), loss=options["loss"])
    own = {n: local_part(p).numel() for n, p in many.backend.model.named_parameters() if ".experts." in n}
    all_experts = sum(p.numel() for n, p in model.named_parameters() if ".experts." in n)
    found = {"held": sum(own.values()) / all_experts}
    for step in range(2):
        samples = routed_samples(step, 5, layers=1 if kind == "deepseek_v3" else 2)
        coefs, mine = loss_coefs(samples, mode="token-mean"), list(range(row, 5, rows))
        share = [samples[i] for i in mine]
        for reference in (False, True):
            a, b = one.score(samples, reference=reference), many.score(share, reference=reference)
            found[f"{step}/score{reference}"] = largest([(a[i], b[k]) for k, i in enumerate(mine)])
        first = one.forward_backward(samples)
        second = many.forward_backward(share, coefs=[coefs[i] for i in mine])
        if rows == 1:
            found[f"{step}/loss"] = abs(first.metrics["loss/total"].total - second.metrics["loss/total"].total)
        # The norms of queries and keys are summed over a row later, before the optimizer uses them.
        skipped = ("q_norm.weight", "k_norm.weight") if degrees.tensor_parallel > 1 else ()
        grads = {n: p.grad for n, p in one.backend.model.named_parameters() if not n.endswith(skipped)}
        whole = {n: p.grad.full_tensor() for n, p in many.backend.model.named_parameters()}
        assert min(float(g.abs().max()) for n, g in grads.items() if "experts" in n or "gate" in n) > 1e-4
        found[f"{step}/gradient"] = max(float((grads[n] - whole[n]).abs().max()) for n in grads)
        norms = [policy.optim_step()["loss/grad_norm"].value for policy in (one, many)]
        found[f"{step}/norm"] = abs(norms[0] - norms[1])
        if step == 0:
            found["state"] = same_parts(state_of(one), state_of(many))
            hand_over(one, many)
            found["loaded"] = same_parts(state_of(one), state_of(many))
    exported = many.backend.gathered(list(many.backend.kinds(is_merged=True)), is_merged=True)
    if dist.get_rank() == 0:
        assert exported.keys() == one.backend.network.own_tensors().keys()
        found["exported"] = same_parts(one.backend.network.own_tensors(), exported)
    return found


def compare_mixtures(*names):
    """Return what `compare_experts` finds of families, and of the ways in which a row splits one."""
    alone, both = {"expert_parallel": 2}, {"expert_parallel": 2, "tensor_parallel": 2}
    tasks = {kind: (kind, alone) for kind in ("qwen3_moe", "mixtral", "deepseek_v3")}
    tasks |= {"and_matrices": ("qwen3_moe", both), "matrices": ("qwen3_moe", {"tensor_parallel": 2})}
    return {name: compare_experts(kind, **degrees) for name, (kind, degrees) in ((name, tasks[name]) for name in names)}


def read_in_parts():
    """Return how far two ranks that each read their part of a model's files and one process that loads it whole differ, with
    an adapter and a copy as reference, and what a warm start hands on; and how much of the files each rank read.

    Also the critic over the backbone of what is trained, and a folder that lacks a tensor.
    """
    rank, folder = dist.get_rank(), Path.cwd()
    if rank == 0:
        tiny_model(VOCAB, hidden=32, layers=2, heads=2, kv_heads=2, seed=5).save_pretrained(folder / "model")
        tiny_model(VOCAB, hidden=32, layers=1, heads=2, kv_heads=2, seed=6).save_pretrained(folder / "teacher")
        shutil.copytree(folder / "model", folder / "lacks")
        tensors = load_file(folder / "lacks" / "model.safetensors")
        save_file({n: t for n, t in tensors.items() if "layers.1.mlp.up" not in n}, folder / "lacks" / "model.safetensors")
    dist.barrier()

    def critic_over(start, mesh):
        return critic_backend(
            load_unread(folder / "model"), optim=OptimSettings(), placement=Sharded(mesh, CPU, start=start)
        )

    options = {
        "optim": OptimSettings(lr=1e-2),
        "loss": LossSettings(distill=DISTILL, algorithm=AlgorithmOptions(kl=KlOptions(coef=0.1))),
        "layout": LayoutSettings(max_tokens_per_batch=20),
        "reference": True,
    }
    samples = samples_of(3, 4)
    coefs = loss_coefs(samples, mode="token-mean")
    found = {}
    for name, tp, has_adapter in (("plain", 1, False), ("tensor_parallel", 2, False), ("adapter", 1, True)):
        mesh = make_mesh(CPU, tensor_parallel=tp)
        row, rows = rank // tp, 2 // tp
        models = [load(folder / "model") for load in (load_model, load_unread)]
        for model in models:
            if has_adapter:
                add_lora(model, LoraSettings(rank=2, alpha=4), seed=1)
        one = local_policy(models[0], teacher=load_model(folder / "teacher"), **options)
        many = sharded_policy(models[1], mesh, teacher=load_unread(folder / "teacher"), **options)
        mine = list(range(row, 4, rows))
        share, own_coefs = [samples[i] for i in mine], [coefs[i] for i in mine]
        for step in range(2):
            one.forward_backward(samples, coefs=coefs)
            many.forward_backward(share, coefs=own_coefs)
            norms = [policy.optim_step()["loss/grad_norm"].value for policy in (one, many)]
            found[f"{name}/norm{step}"] = abs(norms[0] - norms[1]) / norms[0]
        for reference in (False, True):
            a, b = one.score(samples, reference=reference), many.score(share, reference=reference)
            found[f"{name}/score{reference}"] = largest([(a[i], b[k]) for k, i in enumerate(mine)])
        # What training goes on with behind a warm start: new moments, the same weights, a reference that is a copy of them.
        model = load_unread(folder / "model")
        if has_adapter:
            add_lora(model, LoraSettings(rank=2, alpha=4), seed=2)
        backend = policy_backend(model, placement=Sharded(mesh, CPU, start=many.backend.held()), **options | {"loss": None})
        again = ModelPolicy(backend)
        for reference in (False, True):
            found[f"{name}/again{reference}"] = largest(
                zip(again.score(share, reference=reference), many.score(share), strict=True)
            )
        begins = many.backend.held()
        start = inside(begins, "model.")
        found[f"{name}/unowned"] = unowned_bytes(start.values())
        stored_by_all(many)  # torch writes no part that begins behind the start of its storage
        values = None if has_adapter else critic_over(begins, mesh)
        if values is not None:
            found[f"{name}/critic"] = largest([(v, np.zeros(len(v))) for v in values.score(share)])
            held = inside(values.held(), "")
            found[f"{name}/backbone"] = max(float((local_part(held[n]) - local_part(start[n])).abs().sum()) for n in start)
    plain = load_unread(folder / "model")
    for module in (*plain.model.layers, plain):
        fully_shard(module, mesh=make_mesh(CPU)["dp"])
    share = read_weights(plain, CPU)
    whole = sum(t.nbytes for t in load_file(folder / "model" / "model.safetensors").values())
    held = sum(local_part(p).nbytes for p in plain.parameters()) + unowned_bytes(plain.parameters())
    sizes = [None, None]
    dist.all_gather_object(sizes, (share, held))
    found["read"] = {"by_rank": [read for read, _ in sizes], "held": [own for _, own in sizes], "whole": whole}
    found["lacks"] = error_of_all(
        lambda: sharded_policy(load_unread(folder / "lacks"), make_mesh(CPU), optim=OptimSettings())
    )
    return found


def vision_samples(media, codec):
    """Return samples that show a picture, two pictures, and none."""
    shown = [Image.new("RGB", (28, 28), "red")], [Image.new("RGB", (56, 28), color) for color in ("blue", "green")], []
    out = []
    for number, pictures in enumerate(shown):
        parts = [{"type": "image", "image": picture} for picture in pictures] + [{"type": "text", "text": "What is this?"}]
        message = Message(role="user", content=tuple(parts))
        ids = media.expand(codec.encode(codec.template.render([message], add_generation_prompt=True)), [message])
        ids = np.concatenate([ids, codec.encode(" 7 apples")])
        weights = (np.arange(len(ids)) >= len(ids) - 3).astype(np.float32)
        made = TrainSample(
            id=SampleId("g", str(number), 0), token_ids=ids, loss_weights=weights, turn_ids=np.zeros(len(ids), np.int32)
        )
        noise = np.random.default_rng(number).normal(size=len(ids))
        out.append(made.replace(media=message.media, advantages=noise, returns=noise, values=np.zeros(len(ids))))
    return out


def compare_vision():
    """Return how far two ranks and one process differ, of which one rank has all the pictures; and what is said of a medium
    that cannot be read there."""
    tokenizer = vision_tokenizer()
    codec = Codec(tokenizer)
    media = MediaProcessor(tiny_processor(tokenizer), codec)
    model, rank, mesh = tiny_vision_model(tokenizer, layers=1), dist.get_rank(), make_mesh(CPU)
    options = {"optim": OptimSettings(lr=1e-3), "layout": LayoutSettings(max_tokens_per_batch=32), "media": media}
    samples = vision_samples(media, codec)
    share = samples[:2] if rank == 0 else samples[2:]
    found = {}
    for name, alone, sharded, coefs in (
        ("policy", local_policy, sharded_policy, loss_coefs(samples, mode="token-mean")),
        ("critic", local_critic, sharded_critic, value_coefs(samples)),
    ):
        one = alone(copy.deepcopy(model), **options)
        many = sharded(copy.deepcopy(model), mesh, **options)
        a, b = one.score(samples), many.score(share)
        found[f"{name}/score"] = largest([(a[i + 2 * rank], b[i]) for i in range(len(share))])
        one.forward_backward(samples, coefs=coefs)
        many.forward_backward(share, coefs=coefs[:2] if rank == 0 else coefs[2:])
        grads = {n: p.grad for n, p in one.backend.model.named_parameters()}
        whole = {n: p.grad.full_tensor() for n, p in many.backend.model.named_parameters()}
        found[f"{name}/gradient"] = max(float((grads[n] - whole[n]).abs().max()) for n in grads if grads[n] is not None)
        for made in (one, many):
            made.optim_step()
        lost = samples[0].replace(media=tuple(dataclasses.replace(m, source="gone.png") for m in samples[0].media))
        bad = [lost] if rank == 0 else samples[2:]
        found[f"{name}/unreadable"] = error_of_all(lambda many=many, bad=bad: many.score(bad))
    return found


def refusals():
    """Return what is said of models that layers cannot be split of, by the first rank."""
    mesh = make_mesh(CPU, tensor_parallel=2)
    few_heads = tiny_model(VOCAB, hidden=16, layers=1, heads=2, kv_heads=1)
    unknown = GPT2LMHeadModel(GPT2Config(vocab_size=VOCAB, n_positions=64, n_embd=16, n_layer=1, n_head=2))
    unknown.tp_plan = {}
    return [
        error_of_all(lambda model=model: sharded_policy(model, mesh, optim=OptimSettings()))[0]
        for model in (few_heads, unknown)
    ]


LAYOUTS = {
    "rows": LayoutSettings(max_tokens_per_batch=40),
    "packed": LayoutSettings(max_tokens_per_batch=40, packed=True),
    "shared": LayoutSettings(max_tokens_per_batch=40, shared_prefix=True, min_shared=2, min_saving=0.0),
}


def compare_losses():
    """Return for each loss how far the gradient of two ranks, each in a layout of its own kind, is from one process's."""
    mesh = make_mesh(CPU)
    samples = [s.replace(token_ids=np.concatenate([np.arange(3), s.token_ids[3:]])) for s in samples_of(11, 7)]
    samples = [s.replace(rollout_logprobs=s.old_logprobs, correction=np.full(len(s), 0.9, np.float32)) for s in samples]
    coefs = loss_coefs(samples, mode="seq-mean-token-mean")
    found = {}
    for number, name in enumerate(sorted(policy_losses)):
        loss = LossSettings(policy_loss=policy_losses.resolve(name), algorithm=ALGORITHM)
        kind = list(LAYOUTS)[number % len(LAYOUTS)]
        selection = selection_of(loss.policy_loss, kwargs={})
        marks = [np.zeros(len(s)) for s in samples] if selection is None else mark(samples, selection, seed=0)
        marked = [s.replace(marks=m) for s, m in zip(samples, marks, strict=True)]
        one = local_policy(exact_model(layers=1), optim=OptimSettings(), loss=loss, reference=True)
        one.forward_backward(marked, coefs=coefs)
        options = {"optim": OptimSettings(), "loss": loss, "layout": LAYOUTS[kind], "reference": True}
        many = sharded_policy(exact_model(layers=1), mesh, **options)
        mine = assign(marked, settings=LAYOUTS[kind], num_shares=2)[dist.get_rank()]
        many.forward_backward([marked[i] for i in mine], coefs=[coefs[i] for i in mine])
        grads = {n: p.grad for n, p in one.backend.model.named_parameters()}
        whole = {n: p.grad.full_tensor() for n, p in many.backend.model.named_parameters()}
        found[f"{name}, {kind}"] = max(float((grads[n] - whole[n]).abs().max()) for n in grads)
        assert name == "none" or max(float(g.abs().max()) for g in grads.values()) > 1e-4
    return found


def context_samples(seed, size, *, routes=False):
    """Samples of which some begin alike, so that sharing has something to share, at two temperatures."""
    found = routed_samples(seed, size, layers=2) if routes else samples_of(seed, size)
    for i, sample in enumerate(found):
        alike = np.concatenate([np.arange(3), sample.token_ids[3:]]).astype(np.int32)
        returns = {"returns": sample.advantages, "values": sample.advantages * 0.5}
        found[i] = sample.replace(token_ids=alike if i % 3 else sample.token_ids, temperature=0.7 + 0.3 * (i % 2), **returns)
    return found


def context_case(kind):
    """Return the model, the losses and the layout of a case: a ratio and a balance are of whole sequences."""
    model, loss = exact_model(), LossSettings(policy_loss=policy_losses.resolve("gspo"), algorithm=ALGORITHM)
    if kind == "experts":
        model = tiny_model(VOCAB, kind="qwen3_moe", hidden=16, heads=2, kv_heads=2, spread=0.1)
        loss = LossSettings(algorithm=dataclasses.replace(ALGORITHM, routing=RoutingOptions(balance_coef=0.5)))
    if kind == "adapter":
        add_lora(model, LoraSettings(rank=2, alpha=4))
    if kind == "recomputed":
        checkpoint_activations(model)
    return model, loss, LAYOUTS["shared" if kind == "shared" else "packed"]


def compare_context(kinds, **degrees):
    """Return how far ranks that split the tokens of packed rows and one process differ: scores, loss, gradient, norm, state
    of a policy with a reference and a teacher, and of a critic."""
    degrees = Degrees(**degrees)
    wide, found = degrees.context_parallel * degrees.tensor_parallel, {}
    row, rows = dist.get_rank() // wide, dist.get_world_size() // wide
    optim, mesh = OptimSettings(lr=1e-2, max_grad_norm=0.1), make_mesh(CPU, tensor_parallel=degrees.tensor_parallel)
    for kind in kinds:
        model, loss, layout = context_case(kind)
        made = []
        for placed in ({}, {"placement": Sharded(mesh, CPU, degrees=degrees), "layout": layout}):
            own = copy.deepcopy(model)
            if kind == "critic":
                made.append(Critic(critic_backend(exact_model(), optim=optim, **placed)))
                made[-1].backend.take(first_weights(own))
            else:
                backend = policy_backend(own, optim=optim, loss=loss, reference=True, **placed)
                made.append(ModelPolicy(backend, loss=loss))
        one, many = made
        coefs_of = value_coefs if kind == "critic" else functools.partial(loss_coefs, mode="token-mean")
        for step in range(2):
            samples = context_samples(step, 5, routes=kind == "experts")
            mine = list(range(row, 5, rows))
            share, coefs = [samples[i] for i in mine], coefs_of(samples)
            for more in [{}] if kind == "critic" else [{}, {"reference": True}]:
                a, b = one.score(samples, **more), many.score(share, **more)
                found[f"{kind}/score{step}{len(more)}"] = largest([(a[i], b[k]) for k, i in enumerate(mine)])
            passes = [one.backend, many.backend]
            objective = "value" if kind == "critic" else "policy"
            first = one.backend.forward_backward(samples, coefs, objective, 0.1)
            second = many.backend.forward_backward(share, [coefs[i] for i in mine], objective, 0.1)
            if rows == 1:
                names = [n for n, m in first.metrics.items() if isinstance(m, Mean) and n.startswith("loss/")]
                found[f"{kind}/loss{step}"] = max(abs(first.metrics[n].value - second.metrics[n].value) for n in names)
            skipped = ("q_norm.weight", "k_norm.weight") if degrees.tensor_parallel > 1 else ()
            grads = {n: p.grad for n, p in one.backend.model.named_parameters() if p.grad is not None}
            whole = {n: p.grad.full_tensor() for n, p in many.backend.model.named_parameters() if p.grad is not None}
            assert grads.keys() == whole.keys() and max(float(g.abs().max()) for g in grads.values()) > 1e-4
            names = [n for n in grads if not n.endswith(skipped)]
            found[f"{kind}/gradient{step}"] = max(float((grads[n] - whole[n]).abs().max()) for n in names)
            norms = [backend.optim_step() for backend in passes]
            found[f"{kind}/norm{step}"] = abs(norms[0]["loss/grad_norm"].value - norms[1]["loss/grad_norm"].value)
        found[f"{kind}/state"] = same_parts(state_of(one), state_of(many))
    return found


def shifted(many, samples, own):
    """Return how far weights are from what they were, once each group was moved so that scores differ, and put back."""
    before = many.score(samples)
    assert many.backend.weight_groups() == list(groups_of(own))
    for group in many.backend.weight_groups():
        many.backend.shift_weights(group, 0.5)
        many.backend.shift_weights(group, 1.0)
        assert largest(zip(before, many.score(samples), strict=True)) > 1e-5, group
        many.backend.shift_weights(group, 0)
    return same_parts(own, dict(many.weights()))


async def proved(many):
    """Return what the proof of an engine with weights of its own measured, and how far it is from the ranks afterwards."""
    engine = EmbeddedEngine(exact_model(7).eval(), num_slots=4)
    report = await WeightSync(engine, many, WeightProbe(vocab_size=VOCAB, num_prompts=1, num_tokens=8)).start(3)
    assert report.num_groups == len(many.backend.weight_groups()) and report.smallest_effect > 4 * report.canary
    await engine.close()
    return report.canary, report.noise


def compare_leader():
    """Return how far a leader with two ranks and one process differ, from whole batches to the weights after two steps.

    Shares of unlike weight, an idle rank, and the supervised loss: what each rank gets is normalised over the whole batch.
    """
    options = {"optim": OptimSettings(lr=1e-2, max_grad_norm=0.1), "layout": LayoutSettings(max_tokens_per_batch=20)}
    loss = LossSettings(algorithm=ALGORITHM)

    def make(spec, held):
        return policy_backend(exact_model(), placement=Sharded(make_mesh(CPU), CPU), loss=loss, reference=True, **options)

    rank = RankWorker({"policy": make})
    if dist.get_rank():
        follow(rank)
        return None
    mirror, rank_group = exact_model(), ProcessRankGroup(rank, row_width=1)
    backend = RankedBackend(rank_group, "policy", layout=options["layout"], start=mirror.state_dict(), mirror=mirror)
    many = ModelPolicy(backend, loss=loss)
    one = local_policy(exact_model(), loss=loss, reference=True, **options)
    found = {}
    for name, size, method in (
        ("uneven", 5, "forward_backward"),
        ("idle", 1, "forward_backward"),
        ("sft", 3, "sft_forward_backward"),
    ):
        samples = samples_of(len(name), size)
        samples[0] = samples[0].replace(loss_weights=samples[0].loss_weights * 7)
        passes = [getattr(policy, method)(samples) for policy in (one, many)]
        metrics = [made if method.startswith("sft") else made.metrics for made in passes]
        losses = [made["loss/total"].value for made in metrics]
        found[f"{name}/loss"] = abs(losses[0] - losses[1])
        norms = [policy.optim_step()["loss/grad_norm"].value for policy in (one, many)]
        found[f"{name}/norm"] = abs(norms[0] - norms[1]) / norms[0]
        many.backend.gather()
        found[f"{name}/weights"] = same_parts(one.backend.model.state_dict(), mirror.state_dict())
    own = one.backend.network.own_tensors()
    found["streamed"] = same_parts(own, dict(many.weights()))
    found["shifted"] = shifted(many, samples_of(3, 2), own)
    found["canary"], found["noise"] = asyncio.run(proved(many))
    folder = stored(many, Path.cwd() / "of-the-leader")
    found["exported"] = same_parts(own, dict(tensors_in(folder, "model/")))
    many.load(folder)
    found["resumed"] = same_parts(own, dict(many.weights()))
    many.close()
    return found


SHORT = {
    "shards": (compare, 1),
    "tensor_parallel": (compare, 2),
    "losses": (compare_losses,),
    "critic": (compare_critic, 1),
    "bfloat16": (compare_bfloat16,),
    "experts": (compare_mixtures, "qwen3_moe", "and_matrices"),
    "vision": (compare_vision,),
    "refused": (refusals,),
    "dropout": (compare_dropout,),
    "in_parts": (read_in_parts,),
    "context": (functools.partial(compare_context, context_parallel=2), ("packed", "shared", "experts", "critic")),
}
LONG = {
    "context": (functools.partial(compare_context, context_parallel=2), ("adapter", "recomputed")),
    "lora": (compare_lora, 1),
    "lora_tensor_parallel": (compare_lora, 2),
    "critic_tensor_parallel": (compare_critic, 2),
    "experts": (compare_mixtures, "mixtral", "deepseek_v3", "matrices"),
}
"""What the short form has of another way of splitting, or of another family."""


def measure(out, *how):
    """Write the results; `how` may be "long", for what the short form leaves out."""
    is_leader = dist.get_rank() == 0
    results = {name: call(*arguments) for name, (call, *arguments) in (LONG if "long" in how else SHORT).items()}
    if "long" not in how:
        results["leader"] = compare_leader()  # the last, for a leader that closes ends the process group
    if is_leader:
        out.write_text(json.dumps(results))


def measure_context(out, tensor_parallel):
    """Write how far four ranks, of which two rows or pairs split the same tokens, and one process differ."""
    found = compare_context(["shared", "critic"], context_parallel=2, tensor_parallel=int(tensor_parallel))
    if dist.get_rank() == 0:
        out.write_text(json.dumps(found))


def measure_long(out, *_):
    """Write how far loss and gradient of two GPUs that split tokens and of one are apart, and the loss of 128k tokens."""
    device, found = torch.device("cuda", dist.get_rank()), {}
    torch.cuda.set_device(device)
    layout, optim = LayoutSettings(max_tokens_per_batch=2**17, packed=True), OptimSettings()
    for name, length in (("short", 2**12), ("long", 2**17)):
        rng, weights = np.random.default_rng(0), (np.arange(length) % 8 == 7).astype(np.float32)
        ids, noise = rng.integers(0, VOCAB, length).astype(np.int32), rng.normal(size=length).astype(np.float32)
        row = {"loss_weights": weights, "turn_ids": np.zeros(length, np.int32), "advantages": noise}
        samples = [TrainSample(id=SampleId("g", "0", 0), token_ids=ids, **row)]
        sharded = Sharded(make_mesh(device), device, degrees=Degrees(context_parallel=2))
        made = []
        for placement in [None, sharded] if name == "short" else [sharded]:
            model = tiny_model(VOCAB, hidden=256, layers=2, heads=4, kv_heads=2).to(device)
            checkpoint_activations(model)
            policy = ModelPolicy(policy_backend(model, optim=optim, layout=layout, placement=placement))
            loss = policy.forward_backward(samples).metrics["loss/total"].value
            grads = {n: whole_tensor(p.grad).cpu() for n, p in policy.backend.model.named_parameters()}
            made.append({"loss": torch.tensor([loss]), **grads})
        found[name] = same_parts(*made) if name == "short" else abs(float(made[0]["loss"]))
    if dist.get_rank() == 0:
        out.write_text(json.dumps(found))

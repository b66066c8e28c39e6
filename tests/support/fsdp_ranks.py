"""What test_fsdp.py runs on ranks beside the matrix: every loss, faults, dropout, sent tokens, reading in parts, a leader,
long rows."""

import asyncio
import contextlib
import copy
import dataclasses
import itertools
import json
import time

import numpy as np
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch.distributed.fsdp import fully_shard
from torch.utils._python_dispatch import TorchDispatchMode

from polyturn.algorithms.aggregate import loss_coefs
from polyturn.algorithms.losses import mark, policy_losses, selection_of
from polyturn.batching.layout import LayoutSettings
from polyturn.core.errors import PolyturnError
from polyturn.core.sample import SampleId, TrainSample
from polyturn.engines.embedded import EmbeddedEngine
from polyturn.training.fsdp import Sharded, make_mesh
from polyturn.training.hf import checkpoint_activations, load_unread
from polyturn.training.lora import LoraSettings, adapter_tensors, add_lora
from polyturn.training.options import Degrees
from polyturn.training.part_loading import read_weights
from polyturn.training.policy import ModelPolicy, policy_backend
from polyturn.training.rank_group import RankWorker, assign
from polyturn.training.ranked import RankedBackend
from polyturn.training.shards import inside, local_part, whole_tensor
from polyturn.training.weight_probe import WeightProbe
from polyturn.training.weight_shifts import groups_of
from polyturn.training.weight_sync import WeightSync
from support.models import tiny_model
from support.rank_matrix import (
    LAYOUTS,
    OPTIM,
    VOCAB,
    Case,
    base_of,
    difference,
    exact_model,
    folder_of,
    largest,
    loss_of,
    make,
    placement_of,
    samples_of,
    split,
    stored_by_all,
    vision,
)
from support.ranks import LeadingRank, follow
from support.states import stored, tensors_in

CPU = torch.device("cpu")
CASE = Case()


def sharded(case, model, **changes):
    """Return the policy or critic that trains `model` over the ranks."""
    return make(case, model, placement_of(case, "fsdp", CPU), **changes)


def gathered(kept):
    """Return the values of all ranks."""
    every = [None] * dist.get_world_size()
    dist.all_gather_object(every, kept)
    return every


def error_of_all(action):
    """Return the message of what `action` raises, which must be an error of ours on every rank."""
    try:
        action()
    except PolyturnError as problem:
        message = str(problem)
    else:
        message = None
    every = gathered(message)
    assert None not in every, every
    return every


def losses():
    """Return for each loss how far the gradient of two ranks, each in a layout of its own kind, is from one process's."""
    samples = samples_of(Case(layout="shared"), 11, 7)
    samples = [s.replace(rollout_logprobs=s.old_logprobs, correction=np.full(len(s), 0.9, np.float32)) for s in samples]
    coefs = loss_coefs(samples, mode="seq-mean-token-mean")
    found = {}
    for name, layout in zip(sorted(policy_losses), itertools.cycle(LAYOUTS)):
        case = Case(loss=name, layout=layout)
        selection = selection_of(policy_losses.resolve(name), kwargs={})
        marks = [np.zeros(len(s)) for s in samples] if selection is None else mark(samples, selection, seed=0)
        marked = [s.replace(marks=m) for s, m in zip(samples, marks, strict=True)]
        one, many = make(case, exact_model(layers=1)), sharded(case, exact_model(layers=1))
        one.forward_backward(marked, coefs=coefs)
        mine = assign(marked, settings=LAYOUTS[layout], num_shares=2)[dist.get_rank()]
        many.forward_backward([marked[i] for i in mine], coefs=[coefs[i] for i in mine])
        grads = {n: p.grad for n, p in one.backend.model.named_parameters()}
        assert name == "none" or max(float(g.abs().max()) for g in grads.values()) > 1e-4
        found[f"{name}, {layout}"] = difference(
            grads, {n: p.grad.full_tensor() for n, p in many.backend.model.named_parameters()}
        )
    return found


def faults():
    """Return the results of faults on one rank: losses and gradients, pictures, and checkpoints of other models."""
    found = {
        "shards": bad_steps(Case(), "advantages"),
        "tensor": bad_steps(Case(degrees=split(tensor=2)), "advantages"),
        "critic": bad_steps(Case(is_critic=True), "returns"),
    }
    critic, policy = sharded(Case(is_critic=True), exact_model(layers=1)), sharded(CASE, exact_model(layers=1))
    other = stored_by_all(make(Case(is_critic=True), tiny_model(VOCAB, hidden=32, layers=1)))
    found["other_critic"] = error_of_all(lambda: critic.load(other))
    alone = dict(tensors_in(stored_by_all(critic)))
    found["together"] = difference(alone, dict(tensors_in(written_together({"policy": policy, "critic": critic}))))
    for is_critic in (False, True):
        many, samples = sharded(Case(kind="vision", is_critic=is_critic), vision().model()), vision().samples()
        lost = samples[0].replace(media=tuple(dataclasses.replace(m, source="gone.png") for m in samples[0].media))
        bad = [lost] if dist.get_rank() == 0 else samples[2:]
        found[f"picture_{'critic' if is_critic else 'policy'}"] = error_of_all(lambda many=many, bad=bad: many.score(bad))
    return found


def bad_steps(case, field):
    """Return the results of two steps that are not finite on one rank alone, of which one may be skipped.

    The first is so by the numbers in `field`, the second of a policy by a gradient behind a loss that is finite.
    """
    many, wide = sharded(case, exact_model(layers=1)), case.degrees.tensor_parallel
    good = samples_of(case, 7, 2)[dist.get_rank() // wide]
    bad = good.replace(**{field: np.full(len(good), np.inf, np.float32)}) if dist.get_rank() < wide else good
    coefs, before = [np.full(len(good), 0.1, np.float32)], dict(tensors_in(stored_by_all(many), "model/"))
    many.forward_backward([bad], coefs=coefs)
    skipped = many.optim_step()[f"{'critic' if case.is_critic else 'loss'}/skipped_steps"].value
    after = dict(tensors_in(stored_by_all(many), "model/"))
    many.forward_backward([bad if case.is_critic else good], coefs=coefs)
    if dist.get_rank() == 1 and not case.is_critic:
        local_part(next(p.grad for p in many.backend.model.parameters() if p.grad is not None)).fill_(torch.inf)
    return {"skipped": skipped, "changed": difference(before, after), "ended": error_of_all(many.optim_step)}


def written_together(made):
    """Write several states one after the other, then at the same time and on each rank in another order, and return the
    folder of the last critic."""
    folder = folder_of("together")
    for name in sorted(made):
        stored(made[name], folder / "alone" / name)
    for name in sorted(made, reverse=dist.get_rank() == 1):
        made[name].save(folder / "both" / name)
    while not all(one.is_saved() for one in made.values()):
        time.sleep(0.01)
    return folder / "both" / "critic"


def dropout():
    """Return the distance of an adapter's gradient under dropout from that of one process with the same drops, and whether
    the ranks of a row have the same values of the parts that are whole on each.

    Layers with whole inputs alone: of the others each rank of a row draws for its own columns.
    """
    model = exact_model(layers=1)
    torch.manual_seed(dist.get_rank())  # as of a leader that has drawn more
    add_lora(model, LoraSettings(rank=2, alpha=4, dropout=0.5, target_modules=["q_proj", "v_proj", "up_proj"]))
    for name, tensor in adapter_tensors(model).items():
        tensor.add_(0.1 * (".lora_B." in name))
    options = {"optim": OPTIM, "layout": LayoutSettings(max_tokens_per_batch=400, max_padding_per_batch=400)}
    placement, samples, grads = Sharded(Degrees(tensor_parallel=2), CPU), samples_of(CASE, 5, 3), []
    one = ModelPolicy(policy_backend(copy.deepcopy(model), **options))
    many = ModelPolicy(policy_backend(model, placement=placement, **options))
    for made, draws in ((one, placement.drawing(CPU, 0, 0)), (many, contextlib.nullcontext())):
        with draws:
            made.forward_backward(samples)
        grads.append({n: whole_tensor(p.grad) for n, p in made.backend.model.named_parameters() if p.grad is not None})
    every = gathered({n: g for n, g in grads[1].items() if ".lora_A." in n})
    return {"gradient": difference(*grads), "ranks": difference(*every)}


class SentTokens(TorchDispatchMode):
    """Counts the bytes of the exchanges of tokens: all, and those that go to other ranks."""

    def __init__(self):
        super().__init__()
        self.sent = self.away = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops._c10d_functional.all_to_all_single.default:
            rows, _, splits, _ = args
            row = rows[0].nbytes if len(rows) else 0
            self.sent += sum(splits) * row
            self.away += (sum(splits) - splits[dist.get_rank()]) * row
        return func(*args, **(kwargs or {}))


def exchange():
    """Return the bytes that both ranks send of one layer's tokens, and by the formula: 4 k h numbers for each token."""
    case = Case(kind="exact_moe", degrees=split(expert=2))
    layout = LayoutSettings(max_tokens_per_batch=400, packed=True)
    many = sharded(case, exact_model(layers=1, kind="qwen3_moe", spread=0.1), layout=layout)
    samples = samples_of(case, 3, 8)[dist.get_rank() :: 2]
    with SentTokens() as counted:
        many.forward_backward(samples)
    tokens = sum(max(np.flatnonzero(s.loss_weights)) for s in samples)
    every = gathered([counted.sent, counted.away, int(4 * 2 * 16 * 8 * tokens)])
    return [sum(column) for column in zip(*every, strict=True)]


def in_parts():
    """Return the parts of a model's files that ranks read and hold, those that a warm start hands on, and the error
    for a folder that lacks a tensor."""
    folder, case, found = folder_of("parts"), Case(kind="qwen3"), {}
    if dist.get_rank() == 0:
        tiny_model(VOCAB, hidden=32, layers=2, heads=2, kv_heads=2, seed=5).save_pretrained(folder / "model")
        tiny_model(VOCAB, hidden=32, layers=2, heads=2, kv_heads=2, seed=5).save_pretrained(folder / "lacks")
        tensors = load_file(folder / "lacks" / "model.safetensors")
        save_file({n: t for n, t in tensors.items() if "layers.1.mlp.up" not in n}, folder / "lacks" / "model.safetensors")
    dist.barrier()
    share = samples_of(case, 3, 4)[dist.get_rank() :: 2]
    many = sharded(case, load_unread(folder / "model"))
    many.forward_backward(share)
    many.optim_step()
    # New moments, the same weights, and a reference that is a copy of them.
    start = many.backend.held()
    again = make(case, load_unread(folder / "model"), placement_of(case, "fsdp", CPU, start=start))
    for reference in (False, True):
        pairs = zip(again.score(share, reference=reference), many.score(share), strict=True)
        found[f"again{reference}"] = largest(pairs)
    backbone = inside(start, "model.")
    found["unowned"] = unowned_bytes(backbone.values())
    stored_by_all(many)  # torch writes no part that begins behind the start of its storage
    of_values = dataclasses.replace(case, is_critic=True)
    values = make(of_values, load_unread(folder / "model"), placement_of(of_values, "fsdp", CPU, start=start))
    found["values"] = largest([(v, np.zeros(len(v))) for v in values.score(share)])
    held = inside(values.backend.held(), "")
    found["backbone"] = max(float((local_part(held[n]) - local_part(backbone[n])).abs().sum()) for n in backbone)
    plain = load_unread(folder / "model")
    for module in (*plain.model.layers, plain):
        fully_shard(module, mesh=make_mesh(CPU)["dp"])
    read = gathered(read_weights(plain, CPU))
    own = gathered(sum(local_part(p).nbytes for p in plain.parameters()) + unowned_bytes(plain.parameters()))
    whole = sum(t.nbytes for t in load_file(folder / "model" / "model.safetensors").values())
    found |= {"read": read, "held": own, "whole": whole}
    found["lacks"] = error_of_all(lambda: sharded(case, load_unread(folder / "lacks")))
    return found


def unowned_bytes(tensors):
    """Return the bytes of other parts, such as a whole file, that stay in memory because of the parts of this rank."""
    return sum(part.untyped_storage().nbytes() - part.nbytes for part in map(local_part, tensors))


def leader():
    """Return the distance of a leader with two ranks from one process, from whole batches to the weights after three steps.

    Shares of unlike weight, an idle rank, and the supervised loss: what each rank gets is normalised over the whole batch.
    """

    def make_policy(spec, held):
        return sharded(CASE, exact_model()).backend

    rank = RankWorker({"policy": make_policy})
    if dist.get_rank():
        follow(rank)
        return None
    mirror, loss = exact_model(), loss_of(CASE)
    backend = RankedBackend(LeadingRank(rank), "policy", layout=LAYOUTS["rows"], mirror=mirror)
    one, many, found = make(CASE, exact_model()), ModelPolicy(backend, loss=loss), {}
    for name, size, method in (
        ("uneven", 5, "forward_backward"),
        ("idle", 1, "forward_backward"),
        ("sft", 3, "sft_forward_backward"),
    ):
        samples = samples_of(CASE, len(name), size)
        samples[0] = samples[0].replace(loss_weights=samples[0].loss_weights * 7)
        passes = [getattr(policy, method)(samples) for policy in (one, many)]
        metrics = [made if method.startswith("sft") else made.metrics for made in passes]
        totals = [made["loss/total"].value for made in metrics]
        norms = [policy.optim_step()["loss/grad_norm"].value for policy in (one, many)]
        found |= {f"{name}/loss": abs(totals[0] - totals[1]), f"{name}/norm": abs(norms[0] - norms[1]) / norms[0]}
        many.backend.gather()
        found[f"{name}/weights"] = difference(one.backend.model.state_dict(), mirror.state_dict())
    own = one.backend.network.own_tensors()
    found["streamed"] = difference(own, dict(many.weights()))
    found["shifted"] = shifted(many, samples_of(CASE, 3, 2), own)
    found["canary"], found["noise"] = asyncio.run(proved(many))
    folder = stored(many, folder_of("leader"))
    found["exported"] = difference(own, inside(dict(tensors_in(folder)), "model/"))
    many.load(folder)
    found["resumed"] = difference(own, dict(many.weights()))
    many.close()
    return found


def shifted(many, samples, own):
    """Move each group of weights so that scores differ, put it back, and return the remaining difference of the weights."""
    before = many.score(samples)
    assert many.backend.weight_groups() == list(groups_of(own))
    for group in many.backend.weight_groups():
        many.backend.shift_weights(group, 0.5)
        many.backend.shift_weights(group, 1.0)
        assert largest(zip(before, many.score(samples), strict=True)) > 1e-5, group
        many.backend.shift_weights(group, 0)
    return difference(own, dict(many.weights()))


async def proved(many):
    """Return the figures of the proof for an engine with separate weights, and its distance from the ranks afterwards."""
    engine = EmbeddedEngine(exact_model(7).eval(), num_slots=4)
    report = await WeightSync(engine, many, WeightProbe(vocab_size=VOCAB, num_prompts=1, num_tokens=8)).start(3)
    assert report.num_groups == len(many.backend.weight_groups())
    assert report.smallest_effect > 4 * report.canary
    await engine.close()
    return report.canary, report.noise


def measure(out):
    """Write what each function found, as the first rank has it."""
    calls = (losses, faults, dropout, exchange, in_parts, leader)  # a leader ends the group
    found = {call.__name__: call() for call in calls}
    if found["leader"] is not None:
        out.write_text(json.dumps(found))


def measure_reduction(out):
    """Write how far the bfloat16 model's gradient, summed over the ranks, is from the float64 sum of what each rank adds."""
    case, rng = Case(kind="qwen3", is_bfloat16=True), np.random.default_rng(dist.get_rank())
    weights = (np.arange(24) >= 4).astype(np.float32)
    arrays = {"loss_weights": weights, "turn_ids": np.zeros(24, np.int32)}
    ids, noise = rng.integers(0, VOCAB, 24).astype(np.int32), rng.normal(size=24).astype(np.float32)
    samples = [TrainSample(id=SampleId("g", str(dist.get_rank()), 0), token_ids=ids, advantages=noise, **arrays)]
    kept = []
    for placement in (None, placement_of(case, "fsdp", CPU)):
        options = {"optim": OPTIM, "layout": LAYOUTS["rows"], "placement": placement}
        made = ModelPolicy(policy_backend(base_of(case, CPU), **options))
        made.forward_backward(samples)
        kept.append({n: p.grad for n, p in made.backend.optimizer.masters.items() if p.grad is not None})
    alone, over_ranks = kept
    found = {}
    for name, part in alone.items():
        total = part.double()
        dist.all_reduce(total)
        if total.norm() > 1e-6:
            found[name] = float((over_ranks[name].full_tensor().double() - total).norm() / total.norm())
    if dist.get_rank() == 0:
        out.write_text(json.dumps(found))


def measure_long(out, *_):
    """Write how far loss and gradient of two GPUs that split tokens and of one are apart, and the loss of 128k tokens."""
    device, found = torch.device("cuda", dist.get_rank()), {}
    torch.cuda.set_device(device)
    layout = LayoutSettings(max_tokens_per_batch=2**17, packed=True)
    for name, length in (("short", 2**12), ("long", 2**17)):
        rng, weights = np.random.default_rng(0), (np.arange(length) % 8 == 7).astype(np.float32)
        ids, noise = rng.integers(0, VOCAB, length).astype(np.int32), rng.normal(size=length).astype(np.float32)
        row = {"loss_weights": weights, "turn_ids": np.zeros(length, np.int32), "advantages": noise}
        samples = [TrainSample(id=SampleId("g", "0", 0), token_ids=ids, **row)]
        placement = Sharded(Degrees(context_parallel=2), device)
        made = []
        for placed in [None, placement] if name == "short" else [placement]:
            model = tiny_model(VOCAB, hidden=256, layers=2, heads=4, kv_heads=2).to(device)
            checkpoint_activations(model)
            policy = ModelPolicy(policy_backend(model, optim=OPTIM, layout=layout, placement=placed))
            loss = policy.forward_backward(samples).metrics["loss/total"].value
            grads = {n: whole_tensor(p.grad).cpu() for n, p in policy.backend.model.named_parameters()}
            made.append({"loss": torch.tensor([loss]), **grads})
        found[name] = difference(*made) if name == "short" else abs(float(made[0]["loss"]))
    if dist.get_rank() == 0:
        out.write_text(json.dumps(found))

"""Checksums add up: tensors that a server fused, split or padded are compared with the trainer's, to the bit."""

import pytest
import torch

from polyturn.engines.server_side.polyturn_weights import checksums, fold, total
from polyturn.engines.weights.checksums import Composition, ServerChecksums, fold_all


def weights(seed=0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    shapes = {
        "embed_tokens.weight": (10, 8),
        "norm.weight": (8,),
        **{f"layers.{n}.self_attn.q_proj.weight": (16, 8) for n in range(2)},
        **{f"layers.{n}.self_attn.k_proj.weight": (4, 8) for n in range(2)},
        **{f"layers.{n}.self_attn.v_proj.weight": (4, 8) for n in range(2)},
        **{f"layers.{n}.self_attn.o_proj.weight": (8, 16) for n in range(2)},
        **{f"layers.1.mlp.experts.{e}.gate_proj.weight": (6, 8) for e in range(3)},
        **{f"layers.1.mlp.experts.{e}.up_proj.weight": (6, 8) for e in range(3)},
    }
    return {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in shapes.items()}


def served(own, dtype=torch.float32):
    """Return the tensors that a process of a server makes of `own`: fused, stacked, padded."""
    own = {name: tensor.to(dtype) for name, tensor in own.items()}
    made = {"model.norm": own["norm.weight"]}
    made["model.embed"] = torch.cat([own["embed_tokens.weight"], torch.zeros(6, 8, dtype=dtype)])
    for n in range(2):
        attention = [own[f"layers.{n}.self_attn.{part}_proj.weight"] for part in "qkv"]
        made[f"model.layers.{n}.qkv"] = torch.cat(attention).t().contiguous()
        made[f"model.layers.{n}.o"] = own[f"layers.{n}.self_attn.o_proj.weight"]
    experts = [[own[f"layers.1.mlp.experts.{e}.{part}_proj.weight"] for part in ("gate", "up")] for e in range(3)]
    made["model.layers.1.w13"] = torch.stack([torch.cat(both) for both in experts])
    return made


def test_fold_ignores_order_and_adds_up():
    a, b = torch.randn(5, 7), torch.randn(3, 7)
    assert fold(torch.cat([a, b, torch.zeros(2, 7)])) == total([(1, fold(a)), (1, fold(b))])
    assert fold(torch.zeros(9)) == 0
    assert fold(torch.cat([a, a])) == total([(2, fold(a))])
    assert fold(a.t()) == fold(a)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float8_e4m3fn])
def test_single_bit_changes_the_fold(dtype):
    tensor = torch.randn(100).to(dtype)
    before = tensor.clone()
    first = fold(tensor)
    assert tensor.view(torch.int8).equal(before.view(torch.int8))
    for byte in range(0, tensor.nbytes, 7):
        tensor.view(torch.int8)[byte] ^= 1
        assert fold(tensor) != first
        tensor.view(torch.int8)[byte] ^= 1
    assert fold(tensor) == first


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_gpu_folds_to_the_same_number(dtype):
    tensor = torch.randn(2**24 + 77).to(dtype)
    assert fold(tensor.cuda()) == fold(tensor)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_tensor_is_found_in_the_servers_tensors(dtype):
    own = weights()
    held = ServerChecksums.read([checksums(served(own, dtype).items())])
    made = Composition.find(held, own)
    assert made.names == own.keys()
    assert made.problem(held, fold_all(own, made.needed)) is None
    later = weights(seed=1)
    assert (
        made.problem(ServerChecksums.read([checksums(served(later, dtype).items())]), fold_all(later, made.needed)) is None
    )


def test_stale_tensor_is_named_with_its_parts():
    own = weights()
    made = Composition.find(ServerChecksums.read([checksums(served(own).items())]), own)
    later = weights(seed=1)
    stale = later | {"layers.1.self_attn.v_proj.weight": own["layers.1.self_attn.v_proj.weight"]}
    problem = made.problem(ServerChecksums.read([checksums(served(stale).items())]), fold_all(later, made.needed))
    assert problem.startswith("model.layers.1.qkv (from layers.1.self_attn.q_proj.weight + layers.1.self_attn.k_proj.weight")
    assert problem.endswith("of 7 tensors")


def test_checksums_of_server_ranks_add_up():
    own = weights()
    qkv = {n: [own[f"layers.{n}.self_attn.{part}_proj.weight"] for part in "qkv"] for n in range(2)}

    def rank(number):
        made = served(own)
        for n, (q, k, v) in qkv.items():  # two key heads on four ranks: each is on two of them
            made[f"model.layers.{n}.qkv"] = torch.cat([q.chunk(4)[number], k.chunk(2)[number // 2], v.chunk(2)[number // 2]])
            made[f"model.layers.{n}.o"] = own[f"layers.{n}.self_attn.o_proj.weight"].chunk(4, dim=1)[number]
        made["model.embed"] = made["model.embed"].chunk(4)[number]
        made["model.layers.1.w13"] = made["model.layers.1.w13"].chunk(2, dim=2)[number % 2]
        return checksums(made.items())

    made = Composition.find(ServerChecksums.read([rank(number) for number in range(4)]), own)
    assert made.names == own.keys()
    assert {count for part in made.parts for count, _ in part.terms} == {1, 2, 4}


def test_unexplained_tensor_is_left_out():
    own = weights()
    made = served(own) | {"model.norm": torch.randn(8)}
    assert Composition.find(ServerChecksums.read([checksums(made.items())]), own).names == own.keys() - {"norm.weight"}


def test_tied_head_counts_once():
    own = weights()
    own["lm_head.weight"] = own["embed_tokens.weight"]
    assert Composition.find(ServerChecksums.read([checksums(served(own).items())]), own).names == own.keys() - {
        "lm_head.weight"
    }


def test_foreign_hashes_are_not_checksums():
    assert ServerChecksums.read([{"model.norm": "00112233aabbccdd"}]) is None
    assert ServerChecksums.read([]) is None

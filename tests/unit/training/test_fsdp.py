"""A model over two ranks is the model of one process: scores, gradient, norm, state (float64 1e-9), and skipped steps.

Two real processes with gloo compare where the tensors are (`support/rank_matrix.py`, `support/fsdp_ranks.py`).
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from transformers import GPT2Config, GPT2LMHeadModel, GPTNeoXConfig, GPTNeoXForCausalLM

from polyturn.batching.layout import LayoutSettings
from polyturn.core.errors import CheckpointError, ConfigError, RankLostError
from polyturn.core.metrics import Mean, Sum
from polyturn.engines.weights.stream import TensorKind
from polyturn.training.fsdp import Sharded
from polyturn.training.lora import add_lora
from polyturn.training.options import Degrees, LoraSettings
from polyturn.training.process_group import RankHere, join
from polyturn.training.rank_group import RankReply, RankWorker, assign, values_of
from polyturn.training.ranked import RankedBackend, merge_ranks
from polyturn.training.shards import require_same_shapes
from support.models import tiny_model
from support.rank_matrix import judge, names_of
from support.ranks import results_of_ranks
from support.refusals import refuses
from support.samples import sample_of

EXACT = 1e-9
pytestmark = pytest.mark.timeout(900)  # two processes on a busy machine


def of_matrix(folder, ranks, *how):
    return results_of_ranks("support.rank_matrix:measure", ranks, folder / f"{ranks}.json", "fsdp", *how)


QUICK = ("shards", "tensor")
"""The cases of the first tier; one start of two processes computes them all."""


@pytest.fixture(scope="module")
def quick_results(tmp_path_factory):
    return of_matrix(tmp_path_factory.mktemp("ranks"), 2, *QUICK)


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    return of_matrix(tmp_path_factory.mktemp("ranks"), 2, "short")


@pytest.fixture(scope="module")
def long_results(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    return of_matrix(folder, 2, "long") | of_matrix(folder, 4, "long")


@pytest.fixture(scope="module")
def more(tmp_path_factory):
    """The results of the functions of `support/fsdp_ranks.py`."""
    return results_of_ranks("support.fsdp_ranks:measure", 2, tmp_path_factory.mktemp("ranks") / "found.json")


@pytest.mark.parametrize("name", QUICK)
def test_ranks_train_as_one_process(quick_results, name):
    judge("fsdp", name, quick_results[name])


@pytest.mark.cluster
@pytest.mark.parametrize("name", [name for name in names_of("fsdp", is_short=True) if name not in QUICK])
def test_ranks_train_as_one_process_in_common_cases(results, name):
    judge("fsdp", name, results[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", names_of("fsdp", is_short=False))
def test_ranks_train_as_one_process_in_other_cases(long_results, name):
    judge("fsdp", name, long_results[name])


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="two GPUs split the tokens")
def test_two_gpus_train_on_128k_tokens(tmp_path):
    found = results_of_ranks("support.fsdp_ranks:measure_long", 2, tmp_path / "found.json", "cuda")
    assert found["short"] < 1e-3
    assert np.isfinite(found["long"])


@pytest.mark.cluster
def test_bfloat16_gradients_are_summed_in_float32(tmp_path):
    """Over 8 ranks the sum is rounded once, to half of bfloat16's last place; added up in bfloat16 it is farther off."""
    found = results_of_ranks("support.fsdp_ranks:measure_reduction", 8, tmp_path / "found.json")
    assert len(found) > 10 and max(found.values()) < 2**-8 * 0.55


@pytest.mark.cluster
def test_each_rank_writes_its_part_of_a_checkpoint(results):
    shares = [found["written"] for found in results["shards"]]
    assert shares == pytest.approx([0.5, 0.5], abs=0.1)


OF_LEADER = ("canary", "noise")
"""The proof of an engine: the canary changes each rank's shards, and what arrives comes as a stream."""
OF_WARM_START = ("againFalse", "againTrue", "unowned", "values", "backbone")
DIFFERENCES = {
    "no loss depends on ranks or layout": lambda more: (more["losses"].values(), 12, EXACT),
    "leader normalises over all ranks": lambda more: (
        [value for name, value in more["leader"].items() if name not in OF_LEADER], 13, EXACT
    ),
    "engine is proved against shards": lambda more: ([more["leader"][name] for name in OF_LEADER], 2, 1e-4),
    "ranks with the same samples drop the same inputs": lambda more: (more["dropout"].values(), 1, EXACT),
    "policy and critic are written together": lambda more: ([more["faults"]["together"]], 1, 1e-300),
    "warm start goes on in policy and critic": lambda more: ([more["in_parts"][name] for name in OF_WARM_START], 5, 1e-5),
}  # fmt: skip
"""What is compared -> (differences, how many at least, below which each must be)."""


@pytest.mark.cluster
@pytest.mark.parametrize("what", DIFFERENCES)
def test_ranks_agree_with_one_process(more, what):
    found, least, limit = DIFFERENCES[what](more)
    assert len(found) >= least
    assert max(found) < limit, found


@pytest.mark.cluster
@pytest.mark.parametrize("name", ["shards", "tensor", "critic"])
def test_step_that_is_not_finite_on_one_rank_is_skipped_on_all(more, name):
    """The next such step ends the run, on all ranks."""
    found = more["faults"][name]
    assert (found["skipped"], found["changed"]) == (1.0, 0.0)
    assert len(found["ended"]) == 2
    assert all("steps skipped before it: 1" in message for message in found["ended"])


@pytest.mark.cluster
@pytest.mark.parametrize(
    ("name", "words"),
    [("picture_policy", "gone.png"), ("picture_critic", "gone.png"), ("other_critic", "critic is of another model")],
)
def test_error_of_one_rank_is_raised_on_all(more, name, words):
    messages = more["faults"][name]
    assert len(messages) == 2
    assert all(words in message for message in messages)


@pytest.mark.cluster
def test_rank_sends_a_tokens_state_to_each_of_its_experts(more):
    sent, away, by_formula = more["exchange"]
    assert sent == by_formula
    assert away == pytest.approx(sent / 2, rel=0.2), "half of the experts are elsewhere"


@pytest.mark.cluster
def test_rank_reads_and_holds_its_share_of_the_files(more):
    found = more["in_parts"]
    assert found["read"] == found["held"]
    assert sum(found["read"]) == found["whole"]
    assert max(found["read"]) <= 0.5 * found["whole"] + 1024, "of each tensor half"
    assert all("model.layers.1.mlp.up_proj.weight" in message for message in found["lacks"])


@pytest.mark.parametrize(
    ("kind", "degrees", "words"),
    [
        ("qwen3", Degrees(expert_parallel=2), "expert_parallel is 2 .*qwen3"),
        ("mixtral", Degrees(expert_parallel=3), "expert_parallel is 3 .*8 experts"),
        ("qwen3", Degrees(pipeline_parallel=2), "pipeline_parallel is 2"),
    ],
)
def test_degrees_that_a_row_cannot_split_are_refused(kind, degrees, words):
    with pytest.raises(ConfigError, match=words):
        Sharded.check(tiny_model(32, kind=kind, hidden=16), degrees)


@pytest.mark.parametrize(
    ("change", "degrees", "words"),
    [
        ({"num_key_value_heads": 1}, Degrees(tensor_parallel=2), ["num_key_value_heads is 1"]),
        ({"layer_types": ["full_attention", "sliding_attention"]}, Degrees(context_parallel=2), ["sliding_attention"]),
        ({"base_model_ep_plan": {"layers.*.mlp.gate": "colwise"}}, Degrees(expert_parallel=2), ["no plan", "qwen3_moe"]),
    ],
)
def test_layers_that_ranks_cannot_split_are_refused(change, degrees, words):
    model = tiny_model(32, "qwen3" if degrees.expert_parallel == 1 else "qwen3_moe", hidden=16)
    for name, value in change.items():
        setattr(model.config, name, value)
    with pytest.raises(ConfigError) as caught:
        Sharded.check(model, degrees)
    assert all(word in str(caught.value) for word in words)


def test_adapter_of_spread_experts_is_refused():
    model = tiny_model(32, "qwen3_moe", hidden=16)
    add_lora(model, LoraSettings(rank=2, target_modules=["gate_proj", "up_proj", "down_proj"]))
    refuses(lambda: Sharded.check(model, Degrees(expert_parallel=2)), ConfigError, "model.lora adapts", "experts")


def test_model_without_a_tensor_parallel_plan_is_refused():
    model = GPT2LMHeadModel(GPT2Config(vocab_size=32, n_positions=64, n_embd=16, n_layer=1, n_head=2))
    model.tp_plan = {}
    refuses(lambda: Sharded.check(model, Degrees(tensor_parallel=2)), ConfigError, "gpt2")


def test_model_without_key_value_heads_divides_by_its_heads():
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = GPTNeoXForCausalLM(GPTNeoXConfig(vocab_size=32, **sizes))
    Sharded.check(model, Degrees(tensor_parallel=2))
    refuses(lambda: Sharded.check(model, Degrees(tensor_parallel=4)), ConfigError, "num_attention_heads is 2")


def ending_of(ids, *, is_trained=True):
    weights = np.zeros(len(ids), np.float32)
    weights[-1] = is_trained
    return sample_of(("g", "0", 0), np.array(ids, np.int32), weights)


def test_samples_are_assigned_by_cost_of_their_micro_batches():
    of_length = [ending_of(range(n)) for n in (6, 4, 5)]
    rows = LayoutSettings(max_tokens_per_batch=6)
    assert assign(of_length, settings=rows, num_shares=3) == [[0], [2], [1]]
    assert assign(of_length[:1], settings=rows, num_shares=3) == [[0], [], []]


def test_samples_with_a_common_prefix_go_to_one_rank():
    prefixes = [list(range(k, k + 20)) for k in (100, 200)]
    samples = [ending_of([*prefixes[i % 2], i, 9, 9]) for i in range(4)] + [ending_of([1, 2], is_trained=False)]
    shared = LayoutSettings(shared_prefix=True, max_tokens_per_batch=30)
    assert assign(samples, settings=shared, num_shares=2) == [[0, 2, 4], [1, 3]]


def test_losses_of_ranks_add_up_and_the_slowest_gives_the_time():
    ranks = [
        {"loss/total": Mean(0.25), "policy/entropy": Mean(6.0, 3), "tokens/trained": Sum(3), "time/forward": Sum(1.0)},
        {"loss/total": Mean(0.5), "policy/entropy": Mean(2.0, 1), "tokens/trained": Sum(1), "time/forward": Sum(2.0)},
        {"time/forward": Sum(0.5)},
    ]
    merged = {name: metric.value for name, metric in merge_ranks(ranks).items()}
    assert merged == {"loss/total": 0.75, "policy/entropy": 2.0, "tokens/trained": 4, "time/forward": 2.0}


def test_update_without_packing_counts_once_for_all_ranks():
    merged = merge_ranks([{"tokens/packing_refused": Sum(1)}] * 2)
    assert merged["tokens/packing_refused"].value == 1


def test_error_of_a_rank_is_raised_by_the_leader():
    refuses(lambda: values_of([RankReply(value=1), RankReply(error=RankLostError("gone"))]), RankLostError, "gone")


class NamedBackend:
    """A backend that says which it is."""

    def __init__(self, name):
        self.name = name

    def step_count(self):
        return self.name

    def held(self):
        return {"of": self.name}

    def close(self):
        """Nothing is open."""


def test_rank_frees_the_warm_start_policy_before_the_next():
    made, began_with = [], []

    def make(name, held):
        began_with.append(held)
        assert not any(former() for former in made), "there may be no room for two"
        policy = NamedBackend(name)
        made.append(weakref.ref(policy))
        return policy

    rank = RankWorker({"policy": make, "critic": lambda name, held: NamedBackend(held["policy"]["of"])})
    for name in ("warm start", "trained"):
        assert rank.run("policy.make", (name,)).error is None
        assert rank.run("policy.step_count", ()).value == name
    rank.run("critic.make", ("values",))
    assert [rank.run(f"{name}.step_count", ()).value for name in ("policy", "critic")] == ["trained", "trained"]
    assert began_with == [{}, {"policy": {"of": "warm start"}}], "it goes on with those weights"


def test_rank_in_this_process_has_a_group_of_its_own():
    def make(name, held):
        if name == "bad":
            raise ConfigError("no such policy")
        return NamedBackend(name)

    join(is_alone=True)
    group = RankHere(RankWorker({"policy": make}))
    try:
        assert dist.get_world_size() == 1
        refuses(lambda: group.call("policy.make", [("bad",)]), ConfigError, "no such policy")
        assert group.call("policy.make", [("mine",)]) == [None] and group.call("policy.step_count", [()]) == ["mine"]
    finally:
        group.close()
    group.close()
    assert not dist.is_initialized()


def test_checkpoint_with_other_shapes_is_refused():
    two, three, four = (TensorKind((n,), torch.float32) for n in (2, 3, 4))
    own = {"a": two, "b": three}
    refuses(lambda: require_same_shapes({"a": two, "c": three}, own), CheckpointError, "'b'", "'c'")
    refuses(
        lambda: require_same_shapes({"a": two, "b": four}, own),
        CheckpointError,
        "its b has the shape (4,) and this model's (3,)",
    )


class ToldGroup:
    """Two ranks that record their commands."""

    num_ranks = 2
    row_width = 1

    def __init__(self) -> None:
        self.told: list[tuple[str, int]] = []

    def call(self, command: str, shares: Sequence[tuple[Any, ...]]) -> list[Any]:
        self.told.append((command, len(shares)))
        return [None] * len(shares)

    def close(self) -> None:
        self.told.append(("close", self.num_ranks))


def test_close_ends_the_ranks_once():
    group = ToldGroup()
    backend = RankedBackend(group, "policy")
    assert group.told == [("policy.make", 2)]
    backend.close()
    assert group.told[1:] == [("close", 2)]

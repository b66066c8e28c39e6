"""A model over two ranks is the model of one process: scores, gradient, norm, state (float64 1e-9), and what is skipped.

Two real processes with gloo; each comparison is made where the tensors are (`support/sharded_ranks.py`) and judged here.
"""

import weakref

import numpy as np
import pytest
import torch

from polyturn.batching.layout import LayoutSettings
from polyturn.core.errors import CheckpointError, ConfigError, RankLostError
from polyturn.core.metrics import Mean, Sum
from polyturn.core.sample import SampleId, TrainSample
from polyturn.engines.weight_transport import TensorKind
from polyturn.training.backend import Degrees
from polyturn.training.fsdp import Sharded
from polyturn.training.rank_group import RankReply, RankWorker, assign, values_of
from polyturn.training.ranked import merge_ranks
from polyturn.training.shards import require_same_shapes
from support.models import tiny_model
from support.ranks import results_of_ranks

EXACT = 1e-9
CRITICS = ["critic", pytest.param("critic_tensor_parallel", marks=pytest.mark.slow)]
pytestmark = pytest.mark.timeout(900)  # two processes on a busy machine


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    return results_of_ranks("support.sharded_ranks:measure", 2, tmp_path_factory.mktemp("ranks") / "found.json")


@pytest.fixture(scope="module")
def long_results(tmp_path_factory):
    return results_of_ranks("support.sharded_ranks:measure", 2, tmp_path_factory.mktemp("ranks") / "found.json", "long")


@pytest.fixture
def of(request):
    """Return what was found under a name, in the long form where it is that one's."""
    return lambda name: request.getfixturevalue("long_results" if name == "critic_tensor_parallel" else "results")[name]


@pytest.fixture(params=["shards", "tensor_parallel"])
def found(request, results):
    return results[request.param]


@pytest.mark.parametrize("case", ["uneven", "idle_rank"])
def test_gradient_norm_and_scores_do_not_depend_on_the_ranks(found, case):
    assert found[f"{case}/gradient"] < EXACT
    assert found[f"{case}/norm"] < EXACT
    assert found[f"{case}/scoreFalse"] < 1e-6 and found[f"{case}/scoreTrue"] < 1e-6  # scores are float32


def judge_context(found):
    assert len(found) > 12
    for name, difference in found.items():
        case, _, what = name.partition("/")
        # Scores are float32, and so is the model with experts; AdamW divides a gradient by its own size.
        is_low = "score" in what or case == "experts"
        assert difference < (1e-4 if is_low and what == "state" else 1e-5 if is_low else EXACT), name


def test_ranks_that_split_the_tokens_of_packed_rows_compute_what_one_does(results):
    """Shared prefixes, replayed routes with a balance loss and a critic too; the loss is of ratios of whole sequences."""
    judge_context(results["context"])


@pytest.mark.slow
def test_tokens_are_split_of_adapters_and_of_layers_that_are_computed_again(long_results):
    judge_context(long_results["context"])


@pytest.mark.slow
@pytest.mark.parametrize("tensor_parallel", [1, 2])
def test_rows_that_split_tokens_stand_beside_others_and_split_layers(tmp_path, tensor_parallel):
    found = results_of_ranks("support.sharded_ranks:measure_context", 4, tmp_path / "found.json", str(tensor_parallel))
    judge_context(found)


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="two GPUs split the tokens")
def test_two_gpus_train_on_a_conversation_of_128k_tokens(tmp_path):
    found = results_of_ranks("support.sharded_ranks:measure_long", 2, tmp_path / "found.json", "cuda")
    assert found["short"] < 1e-3 and np.isfinite(found["long"])


def test_no_loss_depends_on_the_ranks_whatever_the_layout(results):
    assert len(results["losses"]) >= 12
    assert max(results["losses"].values()) < EXACT, results["losses"]


def test_a_leader_normalises_over_the_batch_of_all_its_ranks(results):
    found = {name: value for name, value in results["leader"].items() if name not in ("canary", "noise")}
    assert len(found) == 13 and max(found.values()) < EXACT, found


def test_an_engine_is_proved_against_weights_that_only_ranks_have(results):
    """The canary changes each rank's shards, and what arrives comes as a stream."""
    assert max(results["leader"]["canary"], results["leader"]["noise"]) < 1e-4, results["leader"]


def test_ranks_that_see_the_same_samples_drop_the_same_inputs_of_an_adapter(results):
    assert max(results["dropout"].values()) < EXACT, results["dropout"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["lora", "lora_tensor_parallel"])
def test_an_adapter_over_shards_is_that_of_one_process(long_results, name):
    """Scores of policy and reference, gradient, norm, the gathered adapter, and a state that is saved and loaded."""
    found = long_results[name]
    scores = [difference for name, difference in found.items() if "score" in name]
    others = [difference for name, difference in found.items() if "score" not in name]
    assert len(scores) == 4 and max(scores) < 1e-6, found
    assert len(others) == 8 and max(others) < EXACT, found


def test_the_whole_state_is_that_of_one_process_and_loads_over_shards(found):
    assert found["state"] < EXACT
    assert found["loaded"] == 0.0 and found["back"] == 0.0


def test_each_rank_writes_its_own_part_of_a_checkpoint(results):
    shares = results["shards"]["written"]
    assert len(shares) == 2 and all(0.4 < share < 0.6 for share in shares), shares


def test_a_loss_that_is_not_finite_on_one_rank_skips_the_step_on_all(found):
    assert found["skipped"] == 1.0
    assert found["skipped_changed"] == 0.0


def test_a_gradient_that_is_not_finite_on_one_rank_ends_the_run_on_all_after_so_many(found):
    assert len(found["ended"]) == 2
    for said in found["ended"]:
        assert "gradient's norm is" in said and "skipped in a row before it: 1" in said


@pytest.mark.parametrize("name", CRITICS)
def test_a_critic_over_ranks_is_that_of_one_process(of, name):
    """Values, gradient, norm, and a state that is saved and loaded."""
    found = of(name)
    assert max(found[f"{step}/score"] for step in range(2)) < 1e-6
    assert max(found[f"{step}/{what}"] for step in range(2) for what in ("gradient", "norm")) < EXACT, found
    assert found["state"] < EXACT and found["loaded"] == 0.0


def test_a_policy_and_its_critic_are_written_at_the_same_time(results):
    """Also where ranks come to the two in another order."""
    assert results["critic"]["together"] == 0.0


@pytest.mark.parametrize("name", CRITICS)
def test_a_value_loss_that_is_not_finite_on_one_rank_is_skipped_on_all_then_ends_the_run(of, name):
    found = of(name)
    assert found["skipped"] == 1.0 and found["skipped_changed"] == 0.0
    assert all("the value loss is not finite at optimizer step 3" in said for said in found["ended"])


@pytest.mark.parametrize("name", ["policy", "critic"])
def test_one_rank_may_have_all_the_pictures(results, name):
    """The parts of a model that see run on that rank alone, and every rank waits for the same collectives."""
    found = results["vision"]
    assert found[f"{name}/score"] < 1e-5 and found[f"{name}/gradient"] < 1e-6, found


@pytest.mark.parametrize("name", ["policy", "critic"])
def test_a_picture_that_one_rank_cannot_read_is_said_by_all(results, name):
    said = results["vision"][f"{name}/unreadable"]
    assert len(said) == 2 and said[0] == said[1] and "gone.png" in said[0]


def test_another_models_critic_is_refused_on_every_rank(results):
    assert all("checkpoint's critic is of another model: its backbone." in said for said in results["critic"]["refused"])


@pytest.mark.parametrize("form", ["results", pytest.param("long_results", marks=pytest.mark.slow)])
def test_experts_over_a_row_are_those_of_one_process(request, form):
    """In float32: scores, loss, gradient, norm, a state that travels and exported weights."""
    for name, found in request.getfixturevalue(form)["experts"].items():
        judge_experts(name, dict(found))


def judge_experts(name, found):
    assert found.pop("held") == (1.0 if name == "matrices" else 0.5)
    assert found.pop("loaded") == 0.0
    # AdamW divides a gradient by its own size, so that rounding of the smallest ones shows in a step.
    bounds = {what: 1e-4 if what in ("state", "exported") else 1e-5 for what in found}
    assert len(found) == 12 and {what: value for what, value in found.items() if not value <= bounds[what]} == {}


@pytest.mark.parametrize(
    ("kind", "degrees", "sentence"),
    [
        ("qwen3", Degrees(expert_parallel=2), "expert_parallel is 2 and there are no experts in a qwen3; set it to 1"),
        ("mixtral", Degrees(expert_parallel=3), "expert_parallel is 3 and the model has 8 experts; it must divide them"),
        ("deepseek_v3", Degrees(expert_parallel=4, tensor_parallel=2), "make them equal, or one of them 1"),
        ("qwen3", Degrees(pipeline_parallel=2), "train.backend is torch, which has none"),
    ],
)
def test_what_a_row_cannot_split_is_refused_in_a_sentence(kind, degrees, sentence):
    with pytest.raises(ConfigError, match=sentence):
        Sharded.check(tiny_model(32, kind=kind, hidden=16), degrees)


def test_tokens_of_a_model_that_cannot_be_packed_are_not_split():
    model = tiny_model(32, hidden=16)
    model.config.layer_types = ["full_attention", "sliding_attention"]
    with pytest.raises(ConfigError, match=r"context_parallel is 2.* because it has layers of sliding_attention"):
        Sharded.check(model, Degrees(context_parallel=2))


def test_a_model_whose_layers_cannot_be_split_is_refused_in_a_sentence(results):
    few_heads, unknown = results["refused"]
    assert "tensor_parallel is 2 and the model's num_key_value_heads is 1; it must divide it" in few_heads
    assert "no tensor parallel plan for 'gpt2'; set it to 1" in unknown


def test_ranks_in_bfloat16_train_what_they_loaded(results):
    """The float32 masters follow the weights that a run begins with, those of a warm start for instance."""
    assert max(results["bfloat16"].values()) < 1e-2


@pytest.mark.parametrize("name", ["plain", "tensor_parallel", "adapter"])
def test_ranks_that_read_their_part_of_the_files_train_as_one_process_that_loads_them(results, name):
    """With a reference that is a copy, a teacher of its own files, and what follows a warm start."""
    found = {what.removeprefix(f"{name}/"): value for what, value in results["in_parts"].items() if what.startswith(name)}
    assert len(found) == (7 if name == "adapter" else 9)
    assert max(found.values()) < 1e-5, found


def test_a_rank_reads_its_share_of_the_files_and_holds_no_more(results):
    read = results["in_parts"]["read"]
    assert read["by_rank"] == read["held"] and sum(read["by_rank"]) == read["whole"]
    assert max(read["by_rank"]) <= 0.5 * read["whole"] + 1024, "of each tensor half, to a row"


def test_a_folder_that_lacks_a_tensor_is_refused_on_every_rank(results):
    said = results["in_parts"]["lacks"]
    assert len(said) == 2 and all("'model.layers.1.mlp.up_proj.weight' is missing there" in one for one in said), said


def sample_of(ids, *, is_trained=True):
    weights = np.zeros(len(ids), np.float32)
    weights[-1] = is_trained
    return TrainSample(
        id=SampleId("g", "0", 0),
        token_ids=np.array(ids, np.int32),
        loss_weights=weights,
        turn_ids=np.zeros(len(ids), np.int32),
    )


def test_samples_are_assigned_by_what_their_micro_batches_cost():
    of_length = [sample_of(range(n)) for n in (6, 4, 5)]
    rows = LayoutSettings(max_tokens_per_batch=6)
    assert assign(of_length, settings=rows, num_shares=3) == [[0], [2], [1]]
    assert assign(of_length[:1], settings=rows, num_shares=3) == [[0], [], []]


def test_samples_with_a_common_prefix_go_to_one_rank_and_those_without_weight_to_the_first():
    prefixes = [list(range(k, k + 20)) for k in (100, 200)]
    samples = [sample_of([*prefixes[i % 2], i, 9, 9]) for i in range(4)] + [sample_of([1, 2], is_trained=False)]
    shared = LayoutSettings(shared_prefix=True, max_tokens_per_batch=30)
    assert assign(samples, settings=shared, num_shares=2) == [[0, 2, 4], [1, 3]]


def test_losses_of_the_ranks_add_up_and_the_slowest_rank_gives_the_time():
    ranks = [
        {"loss/total": Mean(0.25), "policy/entropy": Mean(6.0, 3), "tokens/trained": Sum(3), "time/forward": Sum(1.0)},
        {"loss/total": Mean(0.5), "policy/entropy": Mean(2.0, 1), "tokens/trained": Sum(1), "time/forward": Sum(2.0)},
        {"time/forward": Sum(0.5)},
    ]
    merged = {name: metric.value for name, metric in merge_ranks(ranks).items()}
    assert merged == {"loss/total": 0.75, "policy/entropy": 2.0, "tokens/trained": 4, "time/forward": 2.0}


def test_the_error_of_a_rank_is_the_teams():
    with pytest.raises(RankLostError, match="gone"):
        values_of([RankReply(value=1), RankReply(error=RankLostError("gone"))])


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


def test_a_rank_frees_the_policy_of_the_warm_start_before_it_makes_the_one_that_is_trained():
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


def test_a_checkpoint_of_another_model_is_refused_before_a_rank_loads_it():
    two, three, four = (TensorKind((n,), torch.float32) for n in (2, 3, 4))
    own = {"a": two, "b": three}
    with pytest.raises(CheckpointError, match=r"lacks \['b'\] and has \['c'\]"):
        require_same_shapes({"a": two, "c": three}, own)
    with pytest.raises(CheckpointError, match=r"its b has the shape \(4,\) and this model's \(3,\)"):
        require_same_shapes({"a": two, "b": four}, own)

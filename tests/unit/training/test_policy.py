"""ModelPolicy: scores, losses, the reference, resuming, and the sentence for a loss that is not finite."""

import itertools
import math
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from polyturn.algorithms.losses import TokenLoss, policy_losses
from polyturn.algorithms.options import AlgorithmOptions, AverageOptions, DistillSettings, KlOptions
from polyturn.core.errors import CheckpointError, ConfigError, TrainingError, UnknownNameError
from polyturn.core.metrics import merge, reduce
from polyturn.core.sample import TrainSample
from polyturn.training.loss_terms import LossSettings
from polyturn.training.optim import OptimSettings
from polyturn.training.policy import ModelPolicy, local_policy
from polyturn.training.shards import write_shards
from support.models import tiny_model
from support.refusals import refuses
from support.samples import sample_of
from support.states import stored

VOCAB = 48


def samples(seed: int = 0, num: int = 4, **changes: Any) -> list[TrainSample]:
    rng = np.random.default_rng(seed)
    made = []
    for i in range(num):
        n = int(rng.integers(6, 14))
        weights = np.array([0.0] * 3 + [1.0] * (n - 3), np.float32)
        made.append(
            sample_of(
                ("g0", f"t{i}", 0), rng.integers(0, VOCAB, n), weights, advantages=weights * (1.0 if i % 2 else -1.0)
            ).replace(**changes)
        )
    return made


def with_kl(coef: float) -> AlgorithmOptions:
    return AlgorithmOptions(kl=KlOptions(coef=coef))


def policy(*, reference: bool = False, lr: float = 1e-2, seed: int = 0, **loss: Any) -> ModelPolicy:
    return local_policy(
        tiny_model(VOCAB, hidden=16, seed=seed),
        optim=OptimSettings(lr=lr, warmup_steps=3),
        loss=LossSettings(**loss),
        reference=reference,
    )


def test_scores_are_logprobs_of_weighted_tokens():
    made = policy()
    batch = samples()
    for sample, score in zip(batch, made.score(batch), strict=True):
        assert score.shape == (len(sample),)
        assert (score[:3] == 0).all()
        assert (score[3:] < 0).all()
        ids = torch.from_numpy(sample.token_ids.astype(np.int64))
        with torch.no_grad():
            every = torch.log_softmax(made.backend.model(input_ids=ids[None]).logits[0], -1)
        assert score[5] == pytest.approx(float(every[4, ids[5]]), abs=1e-5)


def test_batch_without_old_logprobs_is_on_policy():
    """The ratio is 1, nothing is clipped, and the gradient is that of the same batch with its own scores as old ones."""
    made = policy()
    batch = samples()
    metrics = reduce(made.forward_backward(batch).metrics)
    assert metrics["policy/ratio"] == 1
    assert metrics["policy/clip_fraction"] == 0
    fresh = [p.grad.clone() for p in made.backend.model.parameters()]
    made.backend.optimizer.zero_grad()
    scored = [s.replace(old_logprobs=o) for s, o in zip(batch, made.score(batch), strict=True)]
    made.forward_backward(scored)
    assert all(torch.allclose(a, p.grad, atol=1e-6) for a, p in zip(fresh, made.backend.model.parameters(), strict=True))


def test_engine_logprobs_can_be_the_old_ones():
    made = policy(algorithm=AlgorithmOptions(old_logprobs="engine"))
    batch = samples()
    theirs = [o - 0.1 * (s.loss_weights > 0) for s, o in zip(batch, made.score(batch), strict=True)]
    engine = [s.replace(rollout_logprobs=o, old_logprobs=o) for s, o in zip(batch, theirs, strict=True)]
    passed = made.forward_backward(engine)
    metrics = reduce(passed.metrics)
    assert passed.entropies is not None
    on_weighted = np.concatenate([e[s.loss_weights > 0] for s, e in zip(engine, passed.entropies, strict=True)])
    assert on_weighted.mean() == pytest.approx(metrics["policy/entropy"], rel=1e-5) and on_weighted.min() > 0
    assert metrics["policy/ratio"] == pytest.approx(math.exp(0.1), rel=1e-4)
    assert metrics["policy/rollout_difference_max"] == pytest.approx(0.1, abs=1e-4)


@pytest.mark.parametrize(
    ("options", "measured"),
    [
        ({}, [True] * 4),
        ({"entropy_every": 2}, [True, False, True, False]),
        ({"entropy_every": 2, "entropy_coef": 0.1}, [True] * 4),
        ({"entropy_every": 2, "entropy_target": 1.0}, [True] * 4),
    ],
)
def test_entropy_is_measured_in_every_kth_update(options: dict[str, Any], measured: list[bool]):
    made = policy(algorithm=AlgorithmOptions(**options))
    has_entropy = []
    for _ in measured:
        metrics = made.forward_backward(samples()).metrics
        has_entropy.append("policy/entropy" in metrics)
        made.optim_step()
    assert has_entropy == measured


def test_training_raises_rewarded_tokens():
    made = policy()
    batch = samples()
    before = [s.sum() for s in made.score(batch)]
    for _ in range(5):
        made.forward_backward(batch)
        made.optim_step()
    after = [s.sum() for s in made.score(batch)]
    assert [b > a for a, b in zip(before, after, strict=True)] == [False, True, False, True]
    assert made.step_count == 5


def test_own_policy_loss_gets_options_and_sequences():
    told = []

    def mine(logprobs_T, old_logprobs_T, advantages_T, *, clip_low, scale, sequence_T):
        told.append((clip_low, sequence_T.tolist()))
        return TokenLoss(-scale * advantages_T * logprobs_T, {})

    once, twice = (policy(policy_loss=mine, policy_loss_kwargs={"scale": scale, "clip_low": 0.1}) for scale in (1.0, 2.0))
    losses = [p.forward_backward(samples()).metrics["loss/total"].value for p in (once, twice)]
    assert losses[1] == pytest.approx(2 * losses[0]) and losses[0] != 0
    assert {clip for clip, _ in told} == {0.1}
    assert all(len(list(itertools.groupby(rows))) == len(set(rows)) for _, rows in told), "a sample's tokens stand together"
    refuses(lambda: policy(policy_loss=mine, policy_loss_kwargs={"scales": 1.0}), ConfigError, "'scales'", "'scale'")


def test_supervised_training_fits_weighted_tokens():
    made = policy()
    batch = samples(advantages=None)
    losses = []
    for _ in range(40):
        losses.append(reduce(merge([made.sft_forward_backward(batch), made.optim_step()]))["loss/sft"])
    assert losses[0] == pytest.approx(math.log(VOCAB), rel=0.05)
    assert losses[-1] < 0.5 * losses[0]


def test_reference_stays_while_the_policy_moves():
    made = policy(reference=True, algorithm=with_kl(0.5))
    batch = samples()
    start = made.score(batch, reference=True)
    assert reduce(made.forward_backward(batch).metrics)["policy/kl_to_reference"] == pytest.approx(0, abs=1e-6)
    for _ in range(4):
        made.optim_step()
        metrics = reduce(made.forward_backward(batch).metrics)
    assert metrics["policy/kl_to_reference"] > 1e-4
    assert metrics["loss/kl"] == pytest.approx(0.5 * metrics["policy/kl_to_reference"], rel=1e-4)
    assert metrics["loss/total"] == pytest.approx(metrics["loss/policy"] + metrics["loss/kl"], rel=1e-4)
    assert all(np.array_equal(a, b) for a, b in zip(start, made.score(batch, reference=True), strict=True))
    given = [s.replace(ref_logprobs=r) for s, r in zip(batch, start, strict=True)]
    made.backend.optimizer.zero_grad()
    assert reduce(made.forward_backward(given).metrics)["loss/kl"] == pytest.approx(metrics["loss/kl"], rel=1e-4)


def test_closed_policy_keeps_no_gradient_and_no_frozen_model():
    made = policy(reference=True)
    made.forward_backward(samples())
    made.close()
    assert all(p.grad is None for p in made.backend.model.parameters())
    refuses(lambda: made.score(samples(), reference=True), ConfigError, "reference")


def test_kl_is_weighted_by_the_ratio_if_asked():
    """The estimate is r k3, r = exp(logprob - old), with the gradient of both."""
    given = [
        s.replace(old_logprobs=np.full(len(s), -3.0, np.float32), ref_logprobs=np.full(len(s), -4.0, np.float32))
        for s in samples()
    ]
    made = policy(reference=True, algorithm=AlgorithmOptions(kl=KlOptions(coef=0.5, importance=True)))
    metrics = reduce(made.forward_backward(given).metrics)
    new = np.concatenate([score[s.loss_weights != 0] for s, score in zip(given, made.score(given), strict=True)]).astype(
        float
    )
    k3 = np.exp(-4.0 - new) - 1 - (-4.0 - new)
    assert metrics["loss/kl"] == pytest.approx(0.5 * (np.exp(new + 3.0) * k3).mean(), rel=1e-4)


def test_time_and_tokens_are_counted():
    made = policy()
    metrics = reduce(merge([made.forward_backward(samples()).metrics, made.optim_step()]))
    assert metrics["tokens/trained"] == sum(s.num_weighted for s in samples())
    assert metrics["time/forward_backward"] == pytest.approx(metrics["time/forward"] + metrics["time/backward"])
    assert metrics["time/forward_backward"] > 0 and metrics["time/optim"] > 0
    assert made.train_seconds == pytest.approx(metrics["time/forward_backward"] + metrics["time/optim"])
    assert 0 <= metrics["tokens/padding_share"] < 1


@pytest.mark.parametrize("reference", [False, True])
def test_resuming_is_exact(reference, tmp_path: Path):
    """train(2N) = train(N) + save + load into a new policy + train(N), bit for bit."""
    kl = 0.1 if reference else 0.0

    def run(made: ModelPolicy, steps: range) -> None:
        for step in steps:
            made.forward_backward(samples(step))
            made.optim_step()

    straight = policy(reference=reference, algorithm=with_kl(kl))
    run(straight, range(8))
    first = policy(reference=reference, algorithm=with_kl(kl))
    run(first, range(4))
    first.save(tmp_path / "state")
    run(first, range(4, 6))  # later changes do not reach the state
    second = policy(reference=reference, algorithm=with_kl(kl), seed=9)
    while not first.is_saved():
        time.sleep(0.01)
    second.load(tmp_path / "state")
    run(second, range(4, 8))
    assert second.step_count == 8
    assert all(
        torch.equal(a, b)
        for a, b in zip(straight.backend.model.parameters(), second.backend.model.parameters(), strict=True)
    )


def test_parameters_are_only_written_in_place(tmp_path: Path):
    """An engine in this process shares the tensors: neither a step nor a load may put new ones in their place."""
    made = policy()
    before = {name: value.data_ptr() for name, value in made.weights().items()}
    state = stored(made, tmp_path / "state")
    made.forward_backward(samples())
    made.optim_step()
    made.load(state)
    assert {name: value.data_ptr() for name, value in made.weights().items()} == before
    assert not any(v.requires_grad for v in made.weights().values())


def test_checkpoint_without_a_moment_is_refused(tmp_path: Path):
    made = policy()
    made.forward_backward(samples())
    made.optim_step()
    state = made.backend.state_dict()
    lost = next(name for name in state if name.startswith("moments/exp_avg_sq/"))
    write_shards({name: part for name, part in state.items() if name != lost}, tmp_path).result()
    refuses(lambda: policy().load(tmp_path), CheckpointError, "exp_avg_sq/")


def test_checkpoint_of_another_model_is_refused(tmp_path: Path):
    state = stored(policy(), tmp_path / "state")
    other = local_policy(tiny_model(VOCAB, hidden=32), optim=OptimSettings())
    refuses(lambda: other.load(state), CheckpointError, "is of another model")
    refuses(lambda: policy(reference=True).load(state), CheckpointError, "without a KL term")


@pytest.mark.parametrize(
    ("name", "message"),
    [("advantages", "advantage nan"), ("old_logprobs", "old_logprob nan"), ("parameters", "logprob nan")],
)
def test_loss_that_is_not_finite_names_its_sample(name, message):
    made = policy()
    made.forward_backward(samples())
    made.optim_step()
    batch = [s.replace(old_logprobs=np.zeros(len(s))) for s in samples()]
    if name == "parameters":
        with torch.no_grad():
            next(made.backend.model.parameters()).fill_(float("nan"))
    else:
        broken = getattr(batch[2], name).copy()
        broken[5] = float("nan")
        batch[2] = batch[2].replace(**{name: broken})
    made.backend.optimizer.settings = OptimSettings(max_skipped=0)
    made.forward_backward(batch)
    with pytest.raises(TrainingError, match="the loss is not finite at optimizer step 1") as caught:
        made.optim_step()
    assert message in str(caught.value)
    assert name == "parameters" or "first token 5 of sample g0/t2/0" in str(caught.value)
    assert all(p.grad is None for p in made.backend.model.parameters())


def test_step_with_a_bad_loss_is_skipped():
    made = policy()
    before = [p.clone() for p in made.backend.model.parameters()]
    broken = samples()
    advantages = broken[2].advantages.copy()
    advantages[5] = np.inf
    broken[2] = broken[2].replace(advantages=advantages)
    found = reduce(merge([made.forward_backward(broken).metrics, made.optim_step()]))
    assert found["loss/skipped_steps"] == 1
    assert all(math.isfinite(v) for v in found.values())
    assert all(torch.equal(a, b) for a, b in zip(before, made.backend.model.parameters(), strict=True))
    made.forward_backward(samples())
    assert reduce(made.optim_step())["loss/skipped_steps"] == 0
    assert not all(torch.equal(a, b) for a, b in zip(before, made.backend.model.parameters(), strict=True))


def test_distillation_has_the_gradient_of_the_kl():
    """Over all next tokens, each weighted by its probability: the term's gradient is that of KL(policy || teacher)."""
    student, teacher = tiny_model(VOCAB, hidden=16, seed=1), tiny_model(VOCAB, hidden=16, seed=2)
    prompt = np.arange(5)
    made = local_policy(
        student,
        optim=OptimSettings(),
        loss=LossSettings(policy_loss=policy_losses.resolve("none"), distill=DistillSettings(teacher="teacher", coef=0.5)),
        teacher=teacher,
    )
    every = [
        sample_of(("g", str(token), 0), np.append(prompt, token), np.array([0.0] * 5 + [1.0]), advantages=np.zeros(6))
        for token in range(VOCAB)
    ]
    ids = torch.arange(5)[None]
    logprobs = torch.log_softmax(student(input_ids=ids).logits[0, -1], -1)
    coefs = [np.array([0.0] * 5 + [float(p)]) for p in logprobs.exp().detach()]
    found = reduce(made.forward_backward(every, coefs=coefs).metrics)
    grads = [p.grad.clone() for p in student.parameters()]
    student.zero_grad()
    with torch.no_grad():
        of_teacher = torch.log_softmax(teacher(input_ids=ids).logits[0, -1], -1)
    kl = (logprobs.exp() * (logprobs - of_teacher)).sum()
    (0.5 * kl).backward()
    assert found["loss/distill"] == pytest.approx(0.5 * kl.item(), rel=1e-4)
    assert all(torch.allclose(g, p.grad, atol=1e-6) for g, p in zip(grads, student.parameters(), strict=True))


def test_marks_are_chosen_over_the_whole_step():
    made = policy(policy_loss=policy_losses.resolve("kl_cov"), policy_loss_kwargs={"kl_cov_ratio": 0.2})
    batch = samples()
    count = sum(s.num_weighted for s in batch)
    found = reduce(made.forward_backward(batch).metrics)
    assert found["policy/marked_share"] == pytest.approx(int(0.2 * count) / count)


def test_adaptive_kl_weight_is_used_and_kept():
    made = local_policy(
        tiny_model(VOCAB, hidden=16),
        optim=OptimSettings(),
        loss=LossSettings(algorithm=AlgorithmOptions(kl=KlOptions(coef=0.1, target=1.0))),
        reference=True,
    )
    batch = [s.replace(ref_logprobs=np.full(len(s), -5.0)) for s in samples()]
    before = reduce(made.forward_backward(batch).metrics)["loss/kl"]
    made.kl.update(100.0, num_trajectories=5000)
    assert reduce(made.forward_backward(batch).metrics)["loss/kl"] == pytest.approx(1.1 * before)
    assert made.state_dict()["kl"] == {"coef": pytest.approx(0.11)}


def test_missing_pieces_are_named():
    refuses(lambda: policy().forward_backward(samples(advantages=None)), TrainingError, "no advantages")
    refuses(lambda: policy(algorithm=with_kl(0.1)), ConfigError, "no reference policy")
    refuses(lambda: policy(distill=DistillSettings(teacher="teacher", coef=0.1)), ConfigError, "there is no teacher")
    refuses(
        lambda: local_policy(tiny_model(VOCAB), optim=OptimSettings(), reference=tiny_model(32)), ConfigError, "32 ", " 48"
    )
    refuses(lambda: policy().score(samples(), reference=True), ConfigError, "built without a reference")
    with pytest.raises(UnknownNameError, match="Did you mean 'token-mean'"):
        LossSettings(algorithm=AlgorithmOptions(aggregate=AverageOptions(name="token-means")))  # type: ignore[arg-type]
    refuses(lambda: LossSettings(algorithm=AlgorithmOptions(kl=KlOptions(estimator="k4"))), UnknownNameError, "'k4'")


def test_checkpoint_holds_a_reference_that_is_in_no_file():
    of_files = local_policy(tiny_model(VOCAB), optim=OptimSettings(), reference=tiny_model(VOCAB), teacher=tiny_model(VOCAB))
    for made, is_held in ((policy(reference=True), True), (of_files, False)):
        assert any(name.startswith("reference/") for name in made.backend.state_dict()) is is_held


def test_ratio_alone_may_not_be_clipped_below_zero():
    for name in ("geo_mean", "dppo_kl"):
        LossSettings(policy_loss=policy_losses.resolve(name), policy_loss_kwargs={"clip_low": 1.5, "clip_high": 1.5})
    refuses(lambda: LossSettings(policy_loss_kwargs={"clip_low": 1.5}), ConfigError, "clip_low is 1.5")
    LossSettings(policy_loss_kwargs={"clip_low": math.inf})  # no bound

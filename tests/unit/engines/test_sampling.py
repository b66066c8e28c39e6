"""Sampling: the draw follows the distribution, limits are respected, logprobs are those of the full distribution."""

import math

import pytest
import torch

from polyturn.engines.sampling import sample


def draw(logits, *, temperature=1.0, top_p=1.0, top_k=-1, uniform=0.5, **options):
    rows = len(logits)

    def column(value, dtype):
        return torch.tensor(value if isinstance(value, list) else [value] * rows, dtype=dtype)

    return sample(
        logits,
        temperature=column(temperature, torch.float32),
        top_p=column(top_p, torch.float32),
        top_k=column(top_k, torch.int64),
        uniform=column(uniform, torch.float64),
        **options,
    )


def grid(n: int) -> list[float]:
    return [(i + 0.5) / n for i in range(n)]


def test_draws_have_the_frequencies_of_the_softmax():
    torch.manual_seed(0)
    row = torch.randn(11) * 2
    n = 20_000
    tokens, *_ = draw(row.expand(n, -1), temperature=0.7, uniform=grid(n))
    shares = torch.bincount(tokens, minlength=11) / n
    torch.testing.assert_close(shares, torch.softmax(row / 0.7, -1), atol=1e-3, rtol=0)


@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.5])
def test_logprobs_are_of_the_full_tempered_vocabulary(temperature):
    torch.manual_seed(1)
    logits = torch.randn(50, 30) * 3
    tokens, logprobs, _ = draw(logits, temperature=temperature, top_p=0.6, top_k=5, uniform=grid(50))
    expected = torch.log_softmax(logits / temperature, -1).gather(1, tokens[:, None]).squeeze(1)
    torch.testing.assert_close(logprobs, expected)


def test_greedy_takes_the_best_and_reports_it_at_temperature_1():
    torch.manual_seed(2)
    logits = torch.randn(8, 30)
    tokens, logprobs, _ = draw(logits, temperature=0.0, uniform=grid(8))
    assert torch.equal(tokens, logits.argmax(-1))
    torch.testing.assert_close(logprobs, torch.log_softmax(logits, -1).max(-1).values)


def test_every_row_has_its_own_settings():
    logits = torch.tensor([[0.0, 1.0, 2.0, 3.0]]).repeat(4, 1)
    tokens, *_ = draw(
        logits, temperature=[0.0, 1.0, 1.0, 1.0], top_k=[-1, 1, -1, 0], top_p=[1.0, 1.0, 0.1, 1.0], uniform=[0.0] * 4
    )
    assert tokens.tolist() == [3, 3, 3, 0]


@pytest.mark.parametrize("top_k", [1, 3, 7, 40])
def test_top_k_keeps_exactly_the_k_best(top_k):
    torch.manual_seed(3)
    row = torch.randn(40)
    tokens, *_ = draw(row.expand(4000, -1), top_k=top_k, temperature=3.0, uniform=grid(4000))
    assert set(tokens.tolist()) == set(row.topk(top_k).indices.tolist())


@pytest.mark.parametrize("top_p", [0.05, 0.3, 0.8, 0.999999])
def test_top_p_keeps_the_smallest_set_that_reaches_p(top_p):
    torch.manual_seed(4)
    row = torch.randn(40)
    probs, order = torch.softmax(row, -1).sort(descending=True)
    count = int((probs.cumsum(0) - probs < top_p).sum())
    tokens, *_ = draw(row.expand(20_000, -1), top_p=top_p, uniform=grid(20_000))
    assert set(tokens.tolist()) == set(order[:count].tolist())


def test_top_p_applies_to_what_top_k_left():
    row = torch.log(torch.tensor([0.4, 0.3, 0.2, 0.1]))
    # Of the two best, 0.4 is 57 %: top_p = 0.5 keeps only it, though 0.4 alone is less than 0.5 of everything.
    tokens, *_ = draw(row.expand(100, -1), top_k=2, top_p=0.5, uniform=grid(100))
    assert set(tokens.tolist()) == {0}


@pytest.mark.parametrize("uniform", [0.0, 1 - 2**-53])
def test_ends_of_the_interval_draw_no_impossible_token(uniform):
    logits = torch.full((1, 1000), float("-inf"))
    logits[0, 400:600] = torch.randn(200)
    tokens, logprobs, _ = draw(logits, uniform=uniform)
    assert 400 <= tokens.item() < 600
    assert torch.isfinite(logprobs).all()


@pytest.mark.parametrize("top_p", [1.0, 0.9])
def test_banned_token_with_all_of_the_probability_is_not_drawn(top_p):
    logits = torch.tensor([[1.0, 0.0, 20.0, 1.0]])
    banned = torch.tensor([[False, False, True, False]])
    tokens, logprobs, _ = draw(logits, temperature=0.1, top_p=top_p, uniform=0.9, banned=banned)
    assert (tokens.item(), logprobs.item()) == (3, pytest.approx(-190.0))


def test_logprobs_are_of_the_kept_tokens_where_the_support_is_kept():
    torch.manual_seed(3)
    logits = torch.randn(200, 30) * 2
    keeps = torch.arange(200) % 2 == 0
    settings = {"temperature": 0.8, "top_p": 0.7, "top_k": 9, "uniform": grid(200)}
    tokens, logprobs, support = draw(logits, **settings, keeps_support=keeps)
    plain = draw(logits, **settings)
    assert torch.equal(tokens, plain.tokens), "it changes no draw"
    torch.testing.assert_close(logprobs[~keeps], plain.logprobs[~keeps])
    assert (support[~keeps] == -1).all()
    tempered = torch.softmax(logits.double() / 0.8, -1)
    for row in torch.nonzero(keeps)[:, 0].tolist():
        likeliest, order = tempered[row].topk(9)
        before = (likeliest / likeliest.sum()).cumsum(0) - likeliest / likeliest.sum()
        kept = order[before < 0.7]
        assert sorted(i for i in support[row].tolist() if i >= 0) == sorted(kept.tolist())
        expected = (tempered[row, tokens[row]] / tempered[row, kept].sum()).log()
        assert logprobs[row].item() == pytest.approx(expected.item(), abs=1e-5)


def test_kept_support_bounds_the_number_of_tokens():
    logits = torch.zeros(2, 500)
    _, logprobs, support = draw(logits, top_p=0.9, keeps_support=torch.tensor([True, False]))
    assert support.shape[1] == 64
    assert logprobs.tolist() == pytest.approx([-math.log((support[0] >= 0).sum()), -math.log(500)], abs=1e-5)


def test_greedy_and_uncut_rows_keep_no_support():
    keeps = torch.ones(2, dtype=torch.bool)
    *_, support = draw(torch.randn(2, 20), temperature=[0.0, 1.0], top_k=[5, -1], keeps_support=keeps)
    assert (support == -1).all()

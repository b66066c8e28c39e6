"""The embedded engine against the model itself: tokens, logprobs, shared weights, slots and their cache, determinism."""

from __future__ import annotations

import asyncio
import copy
import random
import time
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

from polyturn.core.errors import ConfigError, EngineError
from polyturn.core.generation import Completion, FinishReason, GenerateRequest, SamplingParams
from polyturn.engines.embedded import EmbeddedEngine
from polyturn.engines.slot_allocator import SlotAllocator
from polyturn.engines.slots import EngineStats, SlotRequest, Slots
from support.cases import each
from support.refusals import refuses, refuses_later

VOCAB = 96
FAMILIES = {
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "llama": (LlamaConfig, LlamaForCausalLM),
}


def make_model(family: str = "qwen3", *, tied: bool = True, seed: int = 0, **changes):
    config_class, model_class = FAMILIES[family]
    torch.manual_seed(seed)
    options = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 512,
        "initializer_range": 0.2,
        "tie_word_embeddings": tied,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    return model_class(config_class(**{**options, **changes})).eval()


def prompt(length: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(VOCAB), k=length)


_count = iter(range(10**9))


def ask(ids, *, session: str | None = None, name: str | None = None, **sampling) -> GenerateRequest:
    name = name or f"r{next(_count)}"
    return GenerateRequest(request_id=name, session_id=session or name, prompt_ids=ids, sampling=SamplingParams(**sampling))


async def ask_all(engine: EmbeddedEngine, requests) -> list[Completion]:
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(engine.generate(r)) for r in requests]
    return [t.result() for t in tasks]


def reference_logprobs(model, ids, completion: Completion, temperature: float = 1.0) -> np.ndarray:
    full = torch.tensor([[*ids, *completion.token_ids.tolist()]])
    with torch.no_grad():
        logits = model(full).logits[0, len(ids) - 1 : -1]
    return torch.log_softmax(logits / temperature, -1).gather(1, full[0, len(ids) :, None]).squeeze(1).numpy()


# -- tokens, logprobs ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("family", "tied"), [("qwen3", True), ("qwen2", False), ("qwen2", True), ("llama", False)])
@pytest.mark.parametrize("temperature", [0.7, 1.0])
async def test_logprobs_are_those_of_the_model(family, tied, temperature):
    """I8: fp32, 1e-4 at temperatures 1 and 0.7; the prompts have ragged lengths and share the batch."""
    model = make_model(family, tied=tied)
    engine = EmbeddedEngine(model, num_slots=8, prefill_chunk=16)
    prompts = [prompt(n, n) for n in (1, 2, 15, 16, 17, 18, 40, 60)]
    answers = await ask_all(engine, [ask(p, max_tokens=10 + 9 * i, temperature=temperature) for i, p in enumerate(prompts)])
    for ids, answer in zip(prompts, answers, strict=True):
        np.testing.assert_allclose(answer.logprobs, reference_logprobs(model, ids, answer, temperature), atol=1e-4)


@pytest.mark.parametrize("deterministic", [False, True])
async def test_greedy_equals_generate(deterministic):
    model = make_model()
    engine = EmbeddedEngine(model, num_slots=8, deterministic=deterministic)
    prompts = [prompt(n, n) for n in (3, 9, 33, 70)]
    answers = await ask_all(engine, [ask(p, max_tokens=24, temperature=0) for p in prompts])
    for ids, answer in zip(prompts, answers, strict=True):
        expected = model.generate(torch.tensor([ids]), max_new_tokens=24, do_sample=False, pad_token_id=0)
        assert answer.token_ids.tolist() == expected[0, len(ids) :].tolist()
        np.testing.assert_allclose(answer.logprobs, reference_logprobs(model, ids, answer), atol=1e-4)


async def test_contexts_that_outgrow_the_first_allocation_stay_exact():
    model = make_model()
    engine = EmbeddedEngine(model, num_slots=4, prefill_chunk=32)
    prompts = [prompt(20, 1), prompt(120, 2), prompt(300, 3)]
    answers = await ask_all(engine, [ask(p, max_tokens=150) for p in prompts])
    for ids, answer in zip(prompts, answers, strict=True):
        np.testing.assert_allclose(answer.logprobs, reference_logprobs(model, ids, answer), atol=1e-4)


async def test_top_k_and_top_p_hold_for_their_own_request_only():
    model = make_model()
    engine = EmbeddedEngine(model, num_slots=8)
    ids = prompt(12)
    narrow, free = await ask_all(
        engine, [ask(ids, max_tokens=60, top_k=1, temperature=1.5, seed=1), ask(ids, max_tokens=60, temperature=1.5, seed=1)]
    )
    greedy = await engine.generate(ask(ids, max_tokens=60, temperature=0))
    assert narrow.token_ids.tolist() == greedy.token_ids.tolist()
    assert free.token_ids.tolist() != greedy.token_ids.tolist()
    np.testing.assert_allclose(narrow.logprobs, reference_logprobs(model, ids, narrow, 1.5), atol=1e-4)
    tiny_p = await engine.generate(ask(ids, max_tokens=60, top_p=1e-6, seed=1))
    assert tiny_p.token_ids.tolist() == greedy.token_ids.tolist()


async def test_seeds_differ_and_unseeded_requests_differ():
    engine = EmbeddedEngine(make_model(), num_slots=8)
    answers = await ask_all(engine, [ask(prompt(8), max_tokens=16, seed=s) for s in (1, 2, 1, None, None)])
    texts = [tuple(a.token_ids.tolist()) for a in answers]
    assert texts[0] == texts[2]
    assert len({*texts}) == 4


# -- shared weights --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("family", "tied"), [("qwen3", True), ("qwen2", False), ("llama", True)])
async def test_engine_shares_the_memory_of_parameters_alone(family, tied):
    model = make_model(family, tied=tied).train()
    engine = EmbeddedEngine(model, num_slots=2)
    theirs = dict(engine.module.named_parameters(remove_duplicate=False))
    for name, parameter in model.named_parameters(remove_duplicate=False):
        assert theirs[name].data_ptr() == parameter.data_ptr(), name
        assert parameter.requires_grad
        assert not theirs[name].requires_grad
    assert model.training
    assert not engine.module.training
    assert (engine.module.lm_head.weight is engine.module.model.embed_tokens.weight) == tied


async def test_optimizer_step_is_visible_and_gradients_flow():
    model = make_model()
    engine = EmbeddedEngine(model, num_slots=4)
    ids = prompt(10)
    before = await engine.generate(ask(ids, session="s", max_tokens=8, temperature=0))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    full = torch.tensor([ids])
    model(full, labels=full).loss.backward()
    optimizer.step()
    await engine.update_weights(1)
    after = await engine.generate(ask(ids, session="s", max_tokens=8, temperature=0))
    assert after.policy_versions == ((0, 1),)
    assert after.info["prefilled_tokens"] == 10  # the old cache is gone
    np.testing.assert_allclose(after.logprobs, reference_logprobs(model, ids, after), atol=1e-4)
    assert not np.allclose(before.logprobs, after.logprobs, atol=1e-3)


async def test_given_weights_are_copied_and_unknown_names_refused():
    model, other = make_model(), make_model(seed=1)
    engine = EmbeddedEngine(model, num_slots=4)
    await engine.update_weights(2, weights=other.state_dict())
    answer = await engine.generate(ask(prompt(10), max_tokens=8))
    np.testing.assert_allclose(answer.logprobs, reference_logprobs(other, prompt(10), answer), atol=1e-4)
    assert torch.equal(model.lm_head.weight, other.lm_head.weight)
    with pytest.raises(EngineError, match=r"no parameter 'model.norm.weigth'.*'model.norm.weight'"):
        await engine.update_weights(3, weights={"model.norm.weigth": torch.zeros(32)})


async def test_completion_across_an_update_says_where_it_changed():
    model = make_model()
    before = copy.deepcopy(model)
    engine = EmbeddedEngine(model, num_slots=4)
    engine.max_burst_s = 0.0
    ids = prompt(10)
    running = asyncio.create_task(engine.generate(ask(ids, max_tokens=60, seed=1)))
    for _ in range(12):
        await asyncio.sleep(0)
    with torch.no_grad():
        model.model.norm.weight.mul_(1.5)
        model.model.layers[0].self_attn.v_proj.weight.mul_(1.5)
    await engine.update_weights(5)
    answer = await running
    (_, first), (at, second) = answer.policy_versions
    assert (first, second) == (0, 5)
    assert 5 <= at < 60
    assert np.allclose(answer.logprobs[:at], reference_logprobs(before, ids, answer)[:at], atol=1e-4)
    assert abs(answer.logprobs[at] - reference_logprobs(before, ids, answer)[at]) > 1e-3
    assert np.allclose(answer.logprobs[at:], reference_logprobs(model, ids, answer)[at:], atol=1e-4)


async def test_tokens_beside_a_training_thread_come_from_whole_versions():
    model = make_model()
    engine = EmbeddedEngine(model, num_slots=4)
    engine.max_burst_s = 0.0
    versions = [copy.deepcopy(model)]

    def change() -> None:
        full = torch.tensor([prompt(12)])
        gradient = torch.autograd.grad(model(full, labels=full).loss, [model.model.norm.weight])[0]
        engine.freeze()
        with torch.no_grad():
            for parameter in (model.model.norm.weight, model.model.layers[0].self_attn.v_proj.weight):
                parameter.mul_((1.5 if len(versions) % 2 else 1 / 1.5) + 0 * gradient.sum())
                time.sleep(0.01)  # a token that is sampled here would come from half of an update
        versions.append(copy.deepcopy(model))

    ids = [prompt(10, seed) for seed in range(3)]
    running = [asyncio.create_task(engine.generate(ask(own, max_tokens=80, seed=1))) for own in ids]
    for _ in range(12):
        await asyncio.sleep(0)
    engine.freeze()  # so that no answer ends before the first change
    while not all(task.done() for task in running):
        await asyncio.to_thread(change)
        await engine.update_weights(len(versions) - 1)
    answers = [await task for task in running]
    assert all(len(answer.token_ids) == 80 for answer in answers) and max(len(a.policy_versions) for a in answers) > 1
    for own, answer in zip(ids, answers, strict=True):
        ends = [*(start for start, _ in answer.policy_versions[1:]), 80]
        for (start, version), end in zip(answer.policy_versions, ends, strict=True):
            expected = reference_logprobs(versions[version], own, answer)[start:end]
            np.testing.assert_allclose(answer.logprobs[start:end], expected, atol=1e-3)


async def test_frozen_engine_aborts_and_closes():
    engine = EmbeddedEngine(make_model(), num_slots=4)
    engine.freeze()
    aborted, waiting = (asyncio.create_task(engine.generate(ask(prompt(8, i), name=f"r{i}"))) for i in range(2))
    await asyncio.sleep(0.02)
    await engine.abort("r0")
    assert len((await aborted).token_ids) == 0
    await engine.close()
    await refuses_later(lambda: waiting, EngineError, "closed")


async def test_frozen_engine_drops_a_late_request():
    engine = EmbeddedEngine(make_model(), num_slots=4)
    engine.freeze()
    soon = asyncio.get_running_loop().time() + 0.05
    request = GenerateRequest(request_id="late", session_id="late", prompt_ids=[1], deadline=soon)
    async with asyncio.timeout(60):
        answer = await engine.generate(request)
    assert (answer.finish_reason, len(answer.token_ids)) == (FinishReason.ABORT, 0)
    await engine.close()


# -- the cache between turns -----------------------------------------------------------------------------------------


async def test_second_turn_prefills_only_what_is_new():
    model = make_model()
    engine = EmbeddedEngine(model, num_slots=8, share_prefixes=False)
    ids = prompt(30)
    previous = 0
    for turn, observation in enumerate((7, 11, 1)):
        answer = await engine.generate(ask(ids, session="ep", max_tokens=9, seed=turn))
        np.testing.assert_allclose(answer.logprobs, reference_logprobs(model, ids, answer), atol=1e-4)
        assert answer.info["prefilled_tokens"] == (30 if turn == 0 else 1 + previous)
        ids, previous = [*ids, *answer.token_ids.tolist(), *prompt(observation, turn)], observation
    assert engine.stats.prefilled_tokens == 30 + (1 + 7) + (1 + 11)
    assert engine.stats.reused_tokens == 38 + 54


async def test_load_counts_requests_without_a_slot():
    engine = EmbeddedEngine(make_model(), num_slots=1)
    first, *others = [
        asyncio.create_task(engine.generate(ask(prompt(8, i), session=f"s{i}", max_tokens=4, seed=i))) for i in range(3)
    ]
    await first
    assert engine.load.queue >= 1 and 0 < engine.load.kv_use <= 1
    await asyncio.gather(*others)
    assert engine.load.queue == 0


async def test_edited_history_reuses_the_common_prefix():
    model = make_model()
    engine = EmbeddedEngine(model, num_slots=8, share_prefixes=False)
    ids = prompt(40)
    await engine.generate(ask(ids, session="ep", max_tokens=9))
    edited = [*ids[:25], (ids[25] + 1) % VOCAB, *prompt(10, 9)]
    answer = await engine.generate(ask(edited, session="ep", max_tokens=9))
    assert answer.info["prefilled_tokens"] == len(edited) - 25
    np.testing.assert_allclose(answer.logprobs, reference_logprobs(model, edited, answer), atol=1e-4)
    again = await engine.generate(ask(edited, session="ep", max_tokens=1))
    assert again.info["prefilled_tokens"] == 1  # an identical prompt still has to be fed its last token


async def test_idle_sessions_are_evicted_longest_unused_first():
    engine = EmbeddedEngine(make_model(), num_slots=2, share_prefixes=False)
    for session in "ab":
        await engine.generate(ask(prompt(20), session=session, max_tokens=2))
    await engine.generate(ask(prompt(20), session="a", max_tokens=2))  # a is fresher than b now
    await engine.generate(ask(prompt(20), session="c", max_tokens=2))
    kept = await engine.generate(ask(prompt(20), session="a", max_tokens=2))
    assert kept.info["prefilled_tokens"] == 1
    assert engine.stats.evictions == 1
    lost = await engine.generate(ask(prompt(20), session="b", max_tokens=2))
    assert lost.info["prefilled_tokens"] == 20


async def test_ended_session_frees_its_slot_without_eviction():
    engine = EmbeddedEngine(make_model(), num_slots=1)
    for i in range(3):
        await engine.generate(ask(prompt(20, i), session=f"s{i}", max_tokens=2))
        await engine.end_session(f"s{i}")
    assert engine.stats.evictions == 0


async def test_members_of_a_group_share_their_prompt():
    model = make_model()
    engine = EmbeddedEngine(model, num_slots=16)
    ids = prompt(50)
    answers = await ask_all(engine, [ask(ids, max_tokens=12, seed=i) for i in range(8)])
    assert sorted(a.info["prefilled_tokens"] for a in answers) == [1] * 7 + [50]
    assert engine.stats.shared_tokens == 7 * 49
    for answer in answers:
        np.testing.assert_allclose(answer.logprobs, reference_logprobs(model, ids, answer), atol=1e-4)
    assert len({tuple(a.token_ids.tolist()) for a in answers}) == 8


@pytest.mark.parametrize(("seed", "num_slots"), [(0, 3), (1, 3), (2, 16)])
async def test_any_schedule_keeps_every_logprob_exact(seed, num_slots):
    """Sessions of random shape with shared prompts, fewer slots than sessions, compaction and eviction."""
    model = make_model()
    engine = EmbeddedEngine(model, num_slots=num_slots, prefill_chunk=24)
    checked = 0

    async def episode(number: int) -> None:
        nonlocal checked
        rng = random.Random(seed * 1000 + number)
        ids = [*prompt(rng.randrange(1, 60), number % 3), *prompt(rng.randrange(0, 5), number)]
        for turn in range(rng.randrange(1, 5)):
            name = f"{number}/{turn}"
            call = asyncio.create_task(
                engine.generate(ask(ids, session=str(number), name=name, max_tokens=rng.randrange(1, 20)))
            )
            for _ in range(rng.randrange(0, 4)):
                await asyncio.sleep(0)
            chance = rng.random()
            if chance < 0.15:
                call.cancel()
                await asyncio.wait([call])
                continue
            if chance < 0.3:
                await engine.abort(name)
            answer = await call
            if len(answer.token_ids):
                np.testing.assert_allclose(answer.logprobs, reference_logprobs(model, ids, answer), atol=1e-4)
                checked += 1
            ids = [*ids, *answer.token_ids.tolist(), *prompt(rng.randrange(0, 12), turn)]
        await engine.end_session(str(number))

    async with asyncio.TaskGroup() as group:
        for number in range(24):
            group.create_task(episode(number))
    assert checked > 20


# -- deterministic mode ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("crowds", each(2, [(((3, 0), (20, 5)),), (((7, 3), (50, 11)),)]))
async def test_deterministic_bits_do_not_depend_on_other_requests(crowds: tuple[tuple[int, int], ...]):
    """I11's part of the engine: alone, in a crowd, and in a crowd that joins and leaves, the same bits."""

    async def run(crowd: int, *, delay: int) -> list[Completion]:
        engine = EmbeddedEngine(make_model(), num_slots=64, prefill_chunk=16, deterministic=True)
        rng = random.Random(crowd)

        async def noise(number: int) -> None:
            for turn in range(3):
                await engine.generate(ask(prompt(rng.randrange(1, 90), number), max_tokens=rng.randrange(1, 30), seed=turn))

        async with asyncio.TaskGroup() as group:
            for number in range(crowd):
                group.create_task(noise(number))
            for _ in range(delay):
                await asyncio.sleep(0)
            out, ids = [], prompt(37, 5)
            for turn in range(3):
                answer = await engine.generate(ask(ids, session="mine", max_tokens=40, seed=turn, temperature=0.7))
                out.append(answer)
                ids = [*ids, *answer.token_ids.tolist(), *prompt(5, turn)]
        return out

    alone = await run(0, delay=0)
    for crowd, delay in crowds:
        for mine, other in zip(alone, await run(crowd, delay=delay), strict=True):
            assert other.token_ids.tolist() == mine.token_ids.tolist()
            assert other.logprobs.tobytes() == mine.logprobs.tobytes()


# -- limits and refusals ---------------------------------------------------------------------------------------------


async def test_completion_ends_with_the_context():
    model = make_model()
    engine = EmbeddedEngine(model, num_slots=2, max_context=40)
    answer = await engine.generate(ask(prompt(30), max_tokens=100))
    assert (len(answer.token_ids), answer.finish_reason) == (10, FinishReason.LENGTH)
    np.testing.assert_allclose(answer.logprobs, reference_logprobs(model, prompt(30), answer), atol=1e-4)
    assert len((await engine.generate(ask(prompt(39), max_tokens=100))).token_ids) == 1
    await refuses_later(
        lambda: engine.generate(ask(prompt(40))), EngineError, "prompt of 40 tokens, and prompt plus completion may have 40"
    )


@pytest.mark.parametrize(
    ("request_of", "words"),
    [
        (lambda: ask([]), "empty prompt"),
        (lambda: ask([VOCAB + 5]), f"{VOCAB + 5}.* {VOCAB - 1}"),
        (lambda: GenerateRequest(request_id="m", session_id="m", prompt_ids=[1], media=("image",)), "text only"),
        (lambda: ask([1], name="live"), "'live'"),
    ],
)
async def test_request_that_cannot_work_is_refused(request_of, words):
    engine = EmbeddedEngine(make_model(), num_slots=2)
    live = asyncio.create_task(engine.generate(ask([1], name="live", max_tokens=50)))
    await asyncio.sleep(0)
    with pytest.raises(EngineError, match=words):
        await engine.generate(request_of())
    await live


@pytest.mark.parametrize("wrong", [{"num_slots": 0}, {"prefill_chunk": 0}, {"max_context": -1}])
def test_number_out_of_range_is_refused(wrong):
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        EmbeddedEngine(make_model(), **wrong)


async def test_request_past_its_deadline_is_not_started():
    engine = EmbeddedEngine(make_model(), num_slots=2)
    late = GenerateRequest(request_id="late", session_id="late", prompt_ids=[1], deadline=0.0)
    answer = await engine.generate(late)
    assert (answer.finish_reason, len(answer.token_ids)) == (FinishReason.ABORT, 0)
    assert engine.stats.decoded_tokens == 0


def test_window_shorter_than_the_context_is_refused():
    windowed = {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 1}
    refuses(
        lambda: EmbeddedEngine(make_model("qwen2", **windowed), num_slots=2), ConfigError, "'sliding_attention'", "window 64"
    )
    assert EmbeddedEngine(make_model("qwen2", **windowed), num_slots=2, max_context=64).capabilities.max_context == 64


async def test_broken_model_fails_the_request_with_its_error():
    model = make_model()
    model.model.embed_tokens.weight = torch.nn.Parameter(model.model.embed_tokens.weight[:4].clone())
    engine = EmbeddedEngine(model, num_slots=2)
    await refuses_later(lambda: engine.generate(ask([VOCAB - 1])), EngineError, "broke: IndexError")


@pytest.mark.parametrize("temperature", [0.0, 1.0])
async def test_model_that_computes_nan_fails_the_request(temperature):
    model = make_model()
    torch.nn.init.constant_(model.model.norm.weight, float("nan"))
    engine = EmbeddedEngine(model, num_slots=2)
    await refuses_later(lambda: engine.generate(ask([1, 2], temperature=temperature)), EngineError, "computes NaN")


async def test_next_turn_behind_a_thread_joins_the_next_step():
    engine = EmbeddedEngine(make_model(), num_slots=4)
    engine.max_burst_s = 0.0  # each step counts as longer than a burst, as those of a large model are
    engine.follow_up_share = 1e6
    other = asyncio.create_task(engine.generate(ask(prompt(10), max_tokens=200)))
    first = await engine.generate(ask(prompt(12), session="s", max_tokens=4))
    before = engine.stats.decode_steps
    await asyncio.to_thread(time.sleep, 0.02)  # longer than the passes of the loop behind a step
    await engine.generate(ask([*prompt(12), *first.token_ids, 1, 2], session="s", max_tokens=4))
    engine.follow_up_share = 0.0
    assert engine.stats.decode_steps - before <= 5
    await other


async def test_other_tasks_run_beside_decoding():
    engine = EmbeddedEngine(make_model(), num_slots=4)
    engine.max_burst_s = 0.0  # one step at a time, however fast the processor is
    ticks = 0

    async def ticker() -> None:
        nonlocal ticks
        while True:
            ticks += 1
            await asyncio.sleep(0)

    other = asyncio.create_task(ticker())
    await engine.generate(ask(prompt(10), max_tokens=100))
    other.cancel()
    assert ticks >= 20


class CountingSlots(Slots):
    """Slots that count how often a prompt is compared with them."""

    num_comparisons = 0

    def donor(self, prompt: Any) -> tuple[int, int, int]:
        self.num_comparisons += 1
        return super().donor(prompt)


async def test_full_engine_compares_no_prompts() -> None:
    slots = CountingSlots.make(2, 64)
    allocator = SlotAllocator(slots, max_context=64, share_prefixes=True, stats=EngineStats())

    def request(number: int) -> SlotRequest:
        asked = GenerateRequest(
            request_id=f"{number}",
            session_id=f"{number}",
            prompt_ids=np.full(16, number, np.int32),
            sampling=SamplingParams(max_tokens=4),
        )
        return SlotRequest(asked, asyncio.get_running_loop().create_future(), random.Random(0), [(0, 0)])

    waiting, _ = allocator.admit([request(number) for number in range(100)])
    assert (len(waiting), slots.num_comparisons) == (98, 2)
    assert allocator.admit(waiting) == (waiting, [])
    assert slots.num_comparisons == 2
    first = slots.running[0]
    assert first is not None
    allocator.leave(first)
    waiting, _ = allocator.admit(waiting)
    assert (len(waiting), slots.num_comparisons) == (97, 3)

"""Rows that show images and videos through the trainer: the layout gives the model the same input as the row alone."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from polyturn.batching.layout import LayoutSettings
from polyturn.core.errors import AlignmentError, TemplateError
from polyturn.core.messages import Message
from polyturn.core.sample import TrainSample
from polyturn.data.conversations import read_conversations
from polyturn.tokens.codec import Codec
from polyturn.tokens.delta import DeltaEncoder
from polyturn.tokens.multimodal import MediaProcessor
from polyturn.training.optim import OptimSettings
from polyturn.training.policy import ModelPolicy, local_policy
from polyturn.training.sft import encode_conversation
from support.refusals import refuses
from support.samples import sample_of
from support.vision import (
    picture,
    tiny_processor,
    tiny_vision_model,
    vision_tokenizer,
)

TOKENIZER = vision_tokenizer()
CODEC = Codec(TOKENIZER)
PROCESSOR = tiny_processor(TOKENIZER)
MEDIA = MediaProcessor(PROCESSOR, CODEC)


def prompt(*parts: object) -> Message:
    shown = []
    for part in parts:
        if isinstance(part, str):
            shown.append({"type": "text", "text": part})
        else:
            kind = "video" if isinstance(part, list) else "image"
            shown.append({"type": kind, kind: part})
    return Message(role="user", content=tuple(shown))


def sample(
    number: int, *messages: Message, answer: str = " 7 apples", rng: np.random.Generator | None = None
) -> TrainSample:
    """Return a sample of `messages`, in which `answer` was sampled behind each of them."""
    rng = rng or np.random.default_rng(number)
    ids, weights = [], []
    for message in messages:
        shown = MEDIA.expand(CODEC.encode(CODEC.template.render([message], add_generation_prompt=True)), [message])
        said = CODEC.encode(answer)
        ids += [shown, said]
        weights += [np.zeros(len(shown)), np.ones(len(said))]
    token_ids = np.concatenate(ids)
    return sample_of(
        ("g", str(number), 0),
        token_ids,
        np.concatenate(weights),
        advantages=rng.normal(size=len(token_ids)),
        media=tuple(medium for message in messages for medium in message.media),
    )


def samples() -> list[TrainSample]:
    """Rows of text, of one image, of two, of images in a later turn, and of a video."""
    return [
        sample(0, prompt("What is 2+2?")),
        sample(1, prompt(picture("red"), "Which color?")),
        sample(2, prompt("Compare ", picture("red", 56, 84), " and ", picture("blue"), ".")),
        sample(3, prompt("Look."), prompt(picture("green", 56, 28), "and now?"), prompt(picture("blue"))),
        sample(4, prompt([picture("red"), picture("blue"), picture("green")], "What moves?")),
    ]


def policy(*, dtype: torch.dtype = torch.float32, settings: LayoutSettings | None = None) -> ModelPolicy:
    model = tiny_vision_model(TOKENIZER).to(dtype)
    return local_policy(model, optim=OptimSettings(lr=1e-2), layout=settings, media=MEDIA)


def alone(model: torch.nn.Module, one: TrainSample) -> np.ndarray:
    """Return the log-probabilities by a plain pass of the processor and the model over the whole row."""
    text = CODEC.decode(one.token_ids)
    for token in ("<|image_pad|>", "<|video_pad|>"):
        while token * 2 in text:
            text = text.replace(token * 2, token)
    images = [MEDIA._load(m) for m in one.media if m.kind == "image"]
    videos = [MEDIA._load(m) for m in one.media if m.kind == "video"]
    inputs = PROCESSOR(text=[text], images=images or None, videos=videos or None, return_tensors="pt")
    assert inputs["input_ids"][0].tolist() == one.token_ids.tolist()
    with torch.no_grad():
        logprobs = torch.log_softmax(model(**inputs, use_cache=False).logits[0, :-1], -1)
    picked = logprobs.gather(1, inputs["input_ids"][0, 1:, None])[:, 0].numpy()
    return np.concatenate([[0.0], picked]) * one.loss_weights


def test_logprobs_are_those_of_each_row_alone() -> None:
    trainer, rows = policy(), samples()
    for one, scores in zip(rows, trainer.score(rows), strict=True):
        np.testing.assert_allclose(scores, alone(trainer.backend.model, one), atol=1e-5)


def test_another_picture_changes_the_logprobs() -> None:
    red, blue = sample(0, prompt(picture("red"), "Which?")), sample(0, prompt(picture("blue"), "Which?"))
    assert red.token_ids.tolist() == blue.token_ids.tolist()
    first, second = policy().score([red, blue])
    assert np.abs(first - second).max() > 1e-4


def test_gradient_does_not_depend_on_micro_batches() -> None:
    gradients = []
    for tokens in (4096, 64, 1):
        trainer = policy(dtype=torch.float64, settings=LayoutSettings(max_tokens_per_batch=tokens))
        trainer.forward_backward(samples())
        gradients.append(torch.cat([p.grad.flatten() for p in trainer.backend.model.parameters() if p.grad is not None]))
    assert gradients[0].abs().sum() > 0
    for other in gradients[1:]:
        torch.testing.assert_close(other, gradients[0], rtol=1e-9, atol=1e-9)


def test_gradient_reaches_the_vision_encoder() -> None:
    trainer = policy()
    trainer.forward_backward(samples())
    vision = [p.grad for name, p in trainer.backend.model.named_parameters() if "visual" in name]
    assert all(grad is not None and grad.abs().sum() > 0 for grad in vision)


def test_picture_behind_the_last_target_is_cut() -> None:
    """The row is cut before its last target, and a picture behind it must be cut with it."""
    shown = sample(0, prompt(picture("red"), "Which?"))
    behind = MEDIA.expand(CODEC.encode(CODEC.template.render([prompt(picture("blue"))])), [prompt(picture("blue"))])
    longer = shown.replace(
        token_ids=np.concatenate([shown.token_ids, behind]),
        loss_weights=np.concatenate([shown.loss_weights, np.zeros(len(behind))]),
        turn_ids=np.zeros(len(shown) + len(behind), np.int32),
        advantages=np.zeros(len(shown) + len(behind)),
        media=(*shown.media, *prompt(picture("blue")).media),
    )
    (cut,), (whole,) = policy().score([shown]), policy().score([longer])
    np.testing.assert_allclose(whole[: len(cut)], cut, atol=1e-6)


def test_samples_with_media_need_a_processor() -> None:
    trainer = local_policy(tiny_vision_model(TOKENIZER), optim=OptimSettings())
    with pytest.raises(AlignmentError, match="has 1 media, but the policy has no processor"):
        trainer.score([sample(0, prompt(picture("red")))])


def test_image_token_without_an_image_is_refused() -> None:
    one = sample(0, prompt(picture("red"), "Which?"))
    refuses(lambda: policy().score([one.replace(media=())]), TemplateError, "features for other media than the 0")


def test_conversation_with_images_is_encoded_as_in_rollout(tmp_path: Path) -> None:
    picture("red", 56, 28).save(tmp_path / "red.png")
    said = [("user", "<image>Which?"), ("assistant", "red"), ("user", "And <image>?"), ("assistant", "red")]
    row = {"messages": [{"role": r, "content": c} for r, c in said], "images": ["red.png"] * 2}
    (tmp_path / "said.jsonl").write_text(json.dumps(row))
    (conversation,) = read_conversations(tmp_path / "said.jsonl")
    one = encode_conversation(conversation, DeltaEncoder(CODEC, media=MEDIA), id="0")
    assert (len(one.media), int(MEDIA.types(one.token_ids).sum())) == (2, 4)
    trainer = policy()
    np.testing.assert_allclose(trainer.score([one])[0], alone(trainer.backend.model, one), atol=1e-5)

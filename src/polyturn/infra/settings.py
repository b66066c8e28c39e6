"""Settings: the settings of a plug-in as a pydantic model, with a readable message for each invalid value.

class UserSettings(Settings): max_turns: AtLeastOne = 8

UserSettings.read({"max_turn": 3}, who="the user")     ->  "the user: there is no setting 'max_turn'. Did you mean …"
UserSettings.read({"max_turns": "3"}, who="the user")  ->  "the user: max_turns is '3'; it must be a whole number"
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Self, get_args

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from polyturn.core.errors import ConfigError, did_you_mean
from polyturn.core.reward import MAX_REWARD
from polyturn.infra.expected import sentences


def _not_blank(text: str) -> str:
    if not text.strip():
        raise ValueError("give a text")
    return text


Text = Annotated[str, AfterValidator(_not_blank)]
AtLeastOne = Annotated[int, Field(ge=1)]
Seconds = Annotated[float, Field(gt=0)]
Score = Annotated[float, Field(ge=-MAX_REWARD, le=MAX_REWARD)]


class Settings(BaseModel):
    """Settings of a plug-in. A subclass adds its fields; null means the default where a field cannot be null."""

    model_config = ConfigDict(
        frozen=True, strict=True, extra="forbid", allow_inf_nan=False, defer_build=True, protected_namespaces=()
    )

    shows_values: ClassVar[bool] = True
    """Whether messages show invalid values; values under a secret's name are hidden."""

    @classmethod
    def read(cls, config: Mapping[str, Any], *, who: str, ignores_others: bool = False) -> Self:
        """Validate a config; with `ignores_others`, unknown keys are left to a user's subclass of the plug-in.

        Raises:
            ConfigError: a setting is unknown or invalid, or would write a secret into the run's records.
        """
        fields = cls.model_fields
        for name in () if ignores_others else config:
            if name in ("api_key", "key", "token") and name not in fields:
                raise ConfigError(
                    f"{who}: {name} would be written to the run's records; put the key into an environment variable, and "
                    f"name the variable in {'token_env' if 'token_env' in fields else 'api_key_env'}"
                )
            if name not in fields:
                raise ConfigError(f"{who}: there is no setting {name!r}.{did_you_mean(str(name), fields)}")
        known = {k: v for k, v in config.items() if k in fields}
        options = {k: v for k, v in known.items() if v is not None or type(None) in get_args(fields[k].annotation)}
        try:
            return cls.model_validate(options)
        except ValidationError as problem:
            reasons = sentences(problem, shows_values=cls.shows_values)
            raise ConfigError(f"{who}: {'; '.join(reasons)}") from None

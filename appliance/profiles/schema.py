"""What a profile may say."""

import re
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, field_validator, model_validator

from appliance.profiles.allowed import flag_problem, looks_secret, variable_problem

NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")

Device = Literal["thor", "gpu", "cpu"]
Method = Literal["ngram", "mtp", "eagle", "eagle3", "draft_model"]

_LONGEST_TEXT = 1000


def _is_word(value: str) -> str:
    """Becomes one word of a command line, and must not be taken for a flag there."""
    if not value or value.startswith("-") or len(value) > _LONGEST_TEXT or not value.isprintable():
        raise ValueError("a text in one line that does not begin with a dash")
    if looks_secret(value):
        raise ValueError("no secrets: keys and tokens belong in the environment")
    return value


Word = Annotated[str, AfterValidator(_is_word)]


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class Speculation(_Part):
    """Speculative decoding; becomes vLLM's ``--speculative-config``.

    Attributes:
        method: who drafts. ``ngram``: the prompt itself; ``mtp``: heads that the model brings; ``eagle``, ``eagle3``
            and ``draft_model``: a second model.
        tokens: drafted tokens a step; T5 takes verify steps of up to 1 + tokens query tokens.
        model: the second model, a folder or a hub id.
        lookup_max: longest n-gram that is looked for; vLLM's default is 5.
        lookup_min: shortest n-gram that is looked for.
    """

    method: Method
    tokens: int = Field(ge=1, le=32)
    model: Word | None = None
    lookup_max: int | None = Field(None, ge=1)
    lookup_min: int | None = Field(None, ge=1)

    @model_validator(mode="after")
    def _fits_method(self) -> "Speculation":
        drafts = self.method in ("eagle", "eagle3", "draft_model")
        if drafts and self.model is None:
            raise ValueError(f"method {self.method} with a key model, the folder or hub id of the model that drafts")
        if not drafts and self.model is not None:
            raise ValueError(f"method {self.method} without a key model")
        if self.method != "ngram" and (self.lookup_max is not None or self.lookup_min is not None):
            raise ValueError(f"method {self.method} without lookup_max and lookup_min")
        if self.lookup_max is not None and self.lookup_min is not None and self.lookup_min > self.lookup_max:
            raise ValueError("lookup_min of at most lookup_max")
        return self

    def config(self) -> dict[str, str | int]:
        """The value of ``--speculative-config``."""
        names = {"method": self.method, "num_speculative_tokens": self.tokens, "model": self.model}
        lookup = {"prompt_lookup_max": self.lookup_max, "prompt_lookup_min": self.lookup_min}
        return {name: value for name, value in (names | lookup).items() if value is not None}


class Needs(_Part):
    """What the machine must have.

    Attributes:
        device: ``thor``: made for a Thor board, runs on other NVIDIA GPUs too; ``gpu``: any NVIDIA GPU;
            ``cpu``: no GPU needed.
        memory_gib: memory at the peak of the start and while serving, GiB.
    """

    device: Device
    memory_gib: float = Field(gt=0)


class Profile(_Part):
    """One way to run one model.

    Attributes:
        name: the file's name without its ending.
        description: one line for people.
        model: folder, or id on the hub.
        served_model_name: name that clients use; unset means the folder's name or the id.
        kv_cache_dtype: format of the KV cache.
        kv_cache_gib: size of the KV cache, GiB.
        max_model_len: longest prompt plus answer, tokens.
        max_num_seqs: requests that decode in one step.
        attention_backend: vLLM attention backend; empty leaves the choice to vLLM.
        speculation: speculative decoding.
        tool_call_parser: vLLM's parser of this model family's tool calls.
        reasoning_parser: vLLM's parser of its reasoning.
        chat_template_kwargs: defaults for its chat template, such as enable_thinking.
        vllm: further flags of `vllm serve` by their long names; true and false switch, a mapping becomes JSON.
        environment: variables for the engine, those that ``appliance.profiles.allowed`` lists.
        needs: what the machine must have.
    """

    name: str = Field(pattern=f"^{NAME.pattern}$")
    description: Word
    model: Word
    served_model_name: Word | None = None
    kv_cache_dtype: Word | None = None
    kv_cache_gib: int | None = Field(None, ge=1)
    max_model_len: int | None = Field(None, ge=1)
    max_num_seqs: int | None = Field(None, ge=1)
    attention_backend: str | None = Field(None, pattern=r"^[A-Z0-9_]*$")
    speculation: Speculation | None = None
    tool_call_parser: Word | None = None
    reasoning_parser: Word | None = None
    chat_template_kwargs: dict[str, Any] = {}
    vllm: dict[str, Any] = {}
    environment: dict[str, str] = {}
    needs: Needs

    @field_validator("vllm")
    @classmethod
    def _flags(cls, flags: dict[str, Any]) -> dict[str, Any]:
        spelled: set[str] = set()
        for name, value in flags.items():
            problem = flag_problem(name)
            if problem is None and name.replace("_", "-") in spelled:
                problem = "each flag once"
            spelled.add(name.replace("_", "-"))
            if problem is None:
                problem = _value_problem(value)
            if problem is not None:
                raise ValueError(f"{problem} ({name})")
        return flags

    @field_validator("chat_template_kwargs")
    @classmethod
    def _json(cls, values: dict[str, Any]) -> dict[str, Any]:
        if (problem := _json_problem(values)) is not None:
            raise ValueError(problem)
        return values

    @field_validator("environment")
    @classmethod
    def _variables(cls, variables: dict[str, str]) -> dict[str, str]:
        for name, value in variables.items():
            problem = variable_problem(name)
            if problem is None and (not value.isprintable() or len(value) > _LONGEST_TEXT or looks_secret(value)):
                problem = "a text in one line, and no secret"
            if problem is not None:
                raise ValueError(f"{problem} ({name})")
        return variables


def _value_problem(value: object) -> str | None:
    """Why a value can't become words of a command line; None when it can."""
    if isinstance(value, dict):
        return _json_problem(value)
    many = value if isinstance(value, list) else [value]
    if not many or not all(isinstance(one, str | int | float) for one in many):
        return "a text, a number, true, false, a list of these, or a mapping"
    if isinstance(value, list) and any(isinstance(one, bool) for one in value):
        return "a list of texts and numbers"
    for one in many:
        if isinstance(one, str):
            try:
                _is_word(one)
            except ValueError as error:
                return str(error)
    return None


def _json_problem(value: object) -> str | None:
    """Why a value can't be written as JSON; None when it can."""
    if isinstance(value, dict):
        if not all(isinstance(name, str) for name in value):
            return "a mapping whose keys are texts"
        return next((problem for one in value.values() if (problem := _json_problem(one))), None)
    if isinstance(value, list):
        return next((problem for one in value if (problem := _json_problem(one))), None)
    if isinstance(value, str) and looks_secret(value):
        return "no secrets: keys and tokens belong in the environment"
    return None if value is None or isinstance(value, str | int | float) else "what JSON can say"

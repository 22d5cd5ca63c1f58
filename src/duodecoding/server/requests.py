"""What clients may say: the fields of OpenAI's API that are supported, as typed records. Everything else is refused by name."""

from __future__ import annotations

import re
import secrets
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal, TypeVar

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from duodecoding.errors import ContextOverflow, DuoError, UsageError
from duodecoding.types import MAX_SEED, Mode, SamplingParams

T = TypeVar("T", bound=Struct)

INT32 = 2**31 - 1
COPIED = (  # fields whose names and meanings are those of `SamplingParams`
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "logit_bias",
)
Whole = Annotated[int, Meta(ge=1, le=INT32)]
Stop = Annotated[str, Meta(min_length=1)]
Bias = Annotated[float, Meta(ge=-100, le=100)]
Penalty = Annotated[float, Meta(ge=-100, le=100)]
TokenId = Annotated[int, Meta(ge=0, le=INT32)]

# Fields that would change the answer and are not supported, with the values that change nothing.
REFUSED: dict[str, tuple[object, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
    "tools": ([],),
    "tool_choice": ("none",),
    "functions": ([],),
    "function_call": ("none",),
    "audio": (),
    "modalities": (["text"],),
    "prediction": (),
    "reasoning_effort": (),
    "verbosity": (),
    "web_search_options": (),
    "store": (False,),
    "logits_processors": ([],),
    "use_beam_search": (False,),
    "grammar": ("",),
}
# Fields that change nothing about the answer.
HARMLESS = frozenset(
    {
        "user",
        "metadata",
        "service_tier",
        "safety_identifier",
        "prompt_cache_key",
        "prompt_cache_retention",
        "parallel_tool_calls",
        "cache_prompt",
    }
)


class ApiError(Exception):
    """An answer that is an error, in the one shape that OpenAI's clients understand."""

    def __init__(
        self, status: int, message: str, *, kind: str = "", param: str | None = None, code: str | None = None, retry: int = 0
    ) -> None:
        super().__init__(message)
        self.status, self.param, self.code = status, param, code
        self.headers = {"Retry-After": str(retry)} if retry else {}
        self.record = {"message": message, "type": kind or KINDS.get(status, "invalid_request_error"), "param": param, "code": code}

    @property
    def body(self) -> bytes:
        return msgspec.json.encode({"error": self.record})


KINDS = {401: "authentication_error", 429: "rate_limit_error", 500: "server_error", 503: "server_error"}


def as_api_error(error: DuoError, param: str | None = None) -> ApiError:
    """An error of the engine for a client, who cannot change flags: without the fix."""
    message = f"{error.what}: {error.why}" if error.why else error.what
    code = "context_length_exceeded" if isinstance(error, ContextOverflow) else None
    return ApiError(error.http_status, message, param=param, code=code)


class Duo(Struct, forbid_unknown_fields=True):
    """Our extension: what else to tell about the answer, and in which mode to give it."""

    tokens: bool = False
    timeline: bool = False
    mode: Mode | None = None


class StreamOptions(Struct, forbid_unknown_fields=True):
    include_usage: bool = False


class PlainText(Struct, forbid_unknown_fields=True, tag_field="type", tag="text"):
    schema: ClassVar[None] = None


class JsonObject(Struct, forbid_unknown_fields=True, tag_field="type", tag="json_object"):
    schema: ClassVar[dict[str, Any]] = {"type": "object"}


class Schema(Struct, forbid_unknown_fields=True):
    schema: dict[str, Any]
    name: str | None = None
    description: str | None = None
    strict: bool | None = None


class JsonSchema(Struct, forbid_unknown_fields=True, tag_field="type", tag="json_schema"):
    json_schema: Schema

    @property
    def schema(self) -> dict[str, Any]:
        return self.json_schema.schema


class TextPart(Struct, forbid_unknown_fields=True, tag_field="type", tag="text"):
    text: str


class Message(Struct, forbid_unknown_fields=True):
    """The fields that may only be null are those a client sends back from an earlier answer."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[TextPart]
    name: None = None
    refusal: None = None
    audio: None = None
    annotations: None = None
    function_call: None = None
    tool_calls: None = None

    def plain(self) -> dict[str, str]:
        """As chat templates know it."""
        text = self.content if isinstance(self.content, str) else "\n".join(part.text for part in self.content)
        return {"role": "system" if self.role == "developer" else self.role, "content": text}


class Answering(Struct, forbid_unknown_fields=True, kw_only=True):
    """What chats and completions have in common."""

    model: str | None = None
    max_tokens: Whole | None = None
    temperature: Annotated[float, Meta(ge=0, le=100)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=0, le=INT32)] | None = None
    min_p: Annotated[float, Meta(ge=0, lt=1)] | None = None
    seed: Annotated[int, Meta(ge=0, le=MAX_SEED)] | None = None
    stop: Stop | Annotated[list[Stop], Meta(max_length=4)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Meta(ge=0.01, le=100)] | None = None
    logit_bias: dict[TokenId, Bias] | None = None
    ignore_eos: bool = False
    stream: bool = False
    stream_options: StreamOptions | None = None
    response_format: PlainText | JsonObject | JsonSchema | None = None
    duo: Duo | UnsetType = UNSET

    @property
    def limit(self) -> int | None:
        return self.max_tokens

    @property
    def likeliest(self) -> int | None:
        """How many of the likeliest tokens to tell with each; None: not even the probability of the token itself."""
        raise NotImplementedError

    def params(self, defaults: SamplingParams) -> SamplingParams:
        """What the engine needs to know. A request without a seed gets one of its own."""
        asked = {name: getattr(self, name) for name in COPIED if getattr(self, name) is not None}
        if self.stream_options is not None and not self.stream:
            raise ApiError(400, "stream_options needs stream to be true", param="stream_options")
        schema = self.response_format.schema if self.response_format is not None else None
        if schema is not None and self.ignore_eos:
            raise ApiError(400, "ignore_eos does not go with this response_format: JSON has an end", param="ignore_eos")
        return replace(
            defaults,
            **asked,
            max_tokens=self.limit or defaults.max_tokens,
            seed=secrets.randbits(63) if self.seed is None else self.seed,
            stop=(self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ()),
            ignore_eos=self.ignore_eos,
            json_schema=msgspec.json.encode(schema).decode() if schema is not None else "",
            top_logprobs=self.likeliest or 0,
        )


class ChatRequest(Answering, kw_only=True):
    messages: Annotated[list[Message], Meta(min_length=1)]
    max_completion_tokens: Whole | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None

    @property
    def limit(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    @property
    def likeliest(self) -> int | None:
        if self.top_logprobs is not None and not self.logprobs:
            raise ApiError(400, "top_logprobs needs logprobs to be true", param="top_logprobs")
        return self.top_logprobs or 0 if self.logprobs else None


class CompletionRequest(Answering, kw_only=True):
    prompt: str | list[str | TokenId | list[TokenId]]
    logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None

    @property
    def likeliest(self) -> int | None:
        return self.logprobs

    def text_or_ids(self) -> str | list[int]:
        """The one prompt, however it is wrapped."""
        prompt: Any = self.prompt
        if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
            if len(prompt) > 1:
                raise ApiError(400, f"{len(prompt)} prompts in one request; send one request for each", param="prompt")
            prompt = prompt[0]
        if isinstance(prompt, list) and any(not isinstance(token, int) for token in prompt):
            raise ApiError(400, "prompt mixes texts and token ids", param="prompt")
        return prompt  # type: ignore[no-any-return]


class TokenizeRequest(Struct, forbid_unknown_fields=True):
    content: str
    add_special: bool = False
    parse_special: bool = True


class DetokenizeRequest(Struct, forbid_unknown_fields=True):
    tokens: list[TokenId]


def parse(body: bytes, kind: type[T]) -> T:
    """A request out of bytes that anyone may have sent. Null counts as not given, as in OpenAI's API."""
    try:
        raw = msgspec.json.decode(body)
    except UnicodeDecodeError as error:
        raise ApiError(400, f"the body is not valid UTF-8: {error.reason}") from error
    except RecursionError as error:
        raise ApiError(400, "the body is nested too deeply") from error
    except msgspec.DecodeError as error:
        raise ApiError(400, f"the body is not valid JSON: {error}") from error
    if not isinstance(raw, dict):
        raise ApiError(400, f"the body is a JSON {type(raw).__name__}, it must be an object")
    answering = issubclass(kind, Answering)
    given = {name: value for name, value in raw.items() if value is not None and not (answering and _neutral(name, value))}
    try:
        return msgspec.convert(given, kind, str_keys=True)
    except msgspec.ValidationError as error:
        raise _invalid(str(error)) from error
    except RecursionError as error:
        raise ApiError(400, "the body is nested too deeply") from error


def _neutral(name: str, value: object) -> bool:
    """May this field be left out? Refuses those that would have to be obeyed."""
    if name not in REFUSED:
        return name in HARMLESS
    # 1 == True in Python, not in JSON
    if any(type(value) is type(neutral) and value == neutral for neutral in REFUSED[name]):
        return True
    raise ApiError(400, f"{name} is not supported by this server", param=name, code="unsupported_parameter")


def _invalid(message: str) -> ApiError:
    """msgspec ends its messages with the path to the culprit: "Expected `int`, got `str` - at `$.seed`"."""
    found = _WHERE.search(message)
    what, path = (message[: found.start()], found[1].strip(".")) if found else (message, "")
    for start, verb, code in _FIELD_PROBLEMS:
        if what.startswith(start):
            name = what.split("`")[1][:200]
            path = f"{path}.{name}" if path else name
            return ApiError(400, f"{path} {verb}", param=path, code=code)
    return ApiError(400, f"{path}: {what[:1].lower()}{what[1:]}" if path else what, param=path or None)


_WHERE = re.compile(r" - at (?:`key` in )?`\$([^`]*)`$")
_FIELD_PROBLEMS = (
    ("Object contains unknown field", "is not a field of this request", "unknown_parameter"),
    ("Object missing required field", "is missing", "missing_required_parameter"),
)


def check_model(asked: str | None, names: list[str]) -> None:
    if asked is not None and asked not in names:
        known = f"this server has {names[0]}"
        raise ApiError(404, f"the model {asked[:200]!r} does not exist; {known}", param="model", code="model_not_found")


def checked_params(request: Answering, defaults: SamplingParams) -> SamplingParams:
    try:
        return request.params(defaults)
    except UsageError as error:  # the records above say the same; this is the engine's own opinion
        raise as_api_error(error) from error

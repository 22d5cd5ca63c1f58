"""The records that cross module borders. Frozen dataclasses, and the only place with defaults."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Literal

from duodecoding.errors import UsageError

MAX_SEED = 2**63 - 1


class Mode(StrEnum):
    """How target and draft share the work. The answer is the same in all of them."""

    OFF = "off"
    CHAIN = "chain"
    SERIAL = "serial"
    LOCKSTEP = "lockstep"
    DUO = "duo"


class Source(StrEnum):
    """Who proposed a token. `target` is the target's own token, nobody had guessed it."""

    TARGET = "target"
    MODEL = "model"
    LOOKUP = "lookup"
    RECYCLING = "recycling"


FREE_DRAFTS = ("lookup", "free")  # that need no model: text already seen; that and recycling
FinishReason = Literal["stop", "length", "cancelled"]


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """What the answer depends on, besides the prompt and the target."""

    max_tokens: int = 512
    temperature: float = 0.0
    top_k: int = 0  # 0: no limit
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0  # over prompt and answer
    presence_penalty: float = 0.0  # over the answer
    frequency_penalty: float = 0.0  # over the answer
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int = 0
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    json_schema: str = ""  # the answer is JSON that this JSON Schema admits
    top_logprobs: int = 0  # likeliest tokens told with every token of the answer

    def __post_init__(self) -> None:
        _check("max_tokens", self.max_tokens, self.max_tokens >= 1, "at least 1")
        _check("temperature", self.temperature, 0 <= self.temperature <= 100, "between 0 and 100")
        _check("top_k", self.top_k, self.top_k >= 0, "0 (no limit) or more")
        _check("top_p", self.top_p, 0 < self.top_p <= 1, "above 0 and at most 1")
        _check("min_p", self.min_p, 0 <= self.min_p < 1, "at least 0 and below 1")
        _check("repetition_penalty", self.repetition_penalty, 0 < self.repetition_penalty <= 100, "above 0 and at most 100")
        _check("presence_penalty", self.presence_penalty, -100 <= self.presence_penalty <= 100, "between -100 and 100")
        _check("frequency_penalty", self.frequency_penalty, -100 <= self.frequency_penalty <= 100, "between -100 and 100")
        _check("top_logprobs", self.top_logprobs, 0 <= self.top_logprobs <= 20, "between 0 and 20")
        _check("seed", self.seed, 0 <= self.seed <= MAX_SEED, f"between 0 and {MAX_SEED}")
        if isinstance(self.stop, str) or any(not isinstance(s, str) or not s for s in self.stop):
            raise UsageError(f"stop is {self.stop!r}", "it must be a tuple of non-empty strings")
        for token, bias in self.logit_bias.items():
            if not isinstance(token, int) or token < 0 or not -1e4 <= bias <= 1e4:
                raise UsageError(f"logit_bias has {token!r}: {bias!r}", "token ids are 0 or more, biases between -10000 and 10000")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0


def _check(name: str, value: object, holds: bool, demand: str) -> None:
    # NaN fails every comparison, so it lands here too.
    if not holds:
        raise UsageError(f"{name} is {value}", f"it must be {demand}")


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Which models run where. Everything an `LLM` needs, as plain values."""

    model: str = "smollm2-135m"
    draft: str = "auto"  # a model (duo adds the free guesses), "lookup", "free", "none"; "auto": the model's own draft, else free
    mode: Mode = Mode.DUO
    ctx_size: int = 4096  # tokens; never more than the model was trained for
    threads: int = 0  # 0: all physical cores
    threads_draft: int = 0  # 0: as the target
    gpu_layers: int = 0  # layers of the target on the GPU; -1: all
    draft_length: int = 4  # nodes on one guessed path (chain), draft steps a round (serial)
    draft_width: int = 4  # leaves per draft step at most
    max_nodes: int = 63  # guesses per target pass at most: with the root they fill a GPU's tile of 64 rows; measured costs lower it
    turns: Literal["auto", "on", "off"] = "auto"  # duo: a draft model works between passes, or beside them; auto: by cores, sizes
    draft_at: str = ""  # HOST:PORT of a draft server, instead of a draft on this machine (lockstep, duo)
    draft_secret: str = field(default="", repr=False)  # that the server asks for
    branching: int = 8  # guesses kept of an expanded leaf
    draft_engine: Literal["auto", "native", "llamacpp"] = "auto"  # auto: our own where it can run the draft, else llama.cpp
    backend: Literal["auto", "native", "llamacpp", "torch"] = "auto"  # of the target; auto: docs/design.md
    device: str = "auto"  # torch: cpu, cuda, cuda:N; auto: a GPU if there is one
    dtype: str = "auto"  # torch: float32, bfloat16, float16; auto: float32 on a CPU, bfloat16 on a GPU
    compile: Literal["auto", "on", "off"] = "auto"  # torch: faster passes after a slower start; auto: on a GPU
    warmup: bool = False  # torch on a GPU: make ready for all sizes of a pass before the first answer
    lookup_store: str = ""  # a file that keeps the text of conversations, for lookup in later ones
    offline: bool = False
    keep_mb: int = 0  # megabytes for the KV caches of earlier conversations; a server has several at a time

    def __post_init__(self) -> None:
        if self.mode not in list(Mode):
            raise UsageError(f"unknown mode {self.mode!r}", f"the modes are {', '.join(Mode)}")
        object.__setattr__(self, "mode", Mode(self.mode))  # "off" is as good as Mode.OFF, but everyone compares by identity
        _check("ctx_size", self.ctx_size, self.ctx_size >= 16, "at least 16 tokens")
        _check("threads", self.threads, 0 <= self.threads <= 1024, "0 (automatic) to 1024")
        _check("threads_draft", self.threads_draft, 0 <= self.threads_draft <= 1024, "0 (automatic) to 1024")
        _check("gpu_layers", self.gpu_layers, self.gpu_layers >= -1, "-1 (all), 0 (none) or a number of layers")
        _check("draft_length", self.draft_length, 1 <= self.draft_length <= 64, "between 1 and 64")
        _check("draft_width", self.draft_width, 1 <= self.draft_width <= 16, "between 1 and 16")
        _check("keep_mb", self.keep_mb, self.keep_mb >= 0, "0 (keep none) or more")
        _check("max_nodes", self.max_nodes, 1 <= self.max_nodes <= 128, "between 1 and 128")
        _check("turns", self.turns, self.turns in ("auto", "on", "off"), "auto, on or off")

    @property
    def beside(self) -> bool:
        """Does a draft model work while the target does, in a process of its own?"""
        return self.mode is Mode.LOCKSTEP or (self.mode is Mode.DUO and self.turns != "on")


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """Where a server listens and what it allows."""

    host: str = "127.0.0.1"
    port: int = 8000  # 0: any that is free
    api_key: tuple[str, ...] = field(default=(), repr=False)  # any of them opens it; none: everyone may ask
    alias: str = ""  # what the model is called; empty: its own name
    max_queue: int = 64  # requests that wait for their turn; more are turned away
    parallel: int = 1  # engines, each with models and memory of its own
    cors_origins: tuple[str, ...] = ()  # web pages of other origins that may ask; "*": all
    request_timeout: float = 600.0  # seconds of one request, waiting included; 0: no limit
    max_body_mb: int = 4  # megabytes of one request

    def __post_init__(self) -> None:
        _check("port", self.port, 0 <= self.port < 1 << 16, "between 0 and 65535")
        _check("max_queue", self.max_queue, self.max_queue >= 0, "0 or more")
        _check("parallel", self.parallel, 1 <= self.parallel <= 64, "between 1 and 64")
        _check("request_timeout", self.request_timeout, 0 <= self.request_timeout <= 1e6, "0 (no limit) to a million seconds")
        _check("max_body_mb", self.max_body_mb, 1 <= self.max_body_mb <= 1024, "between 1 and 1024")
        if any(not key.isascii() or not key.isprintable() or key != key.strip() or not key for key in self.api_key):
            raise UsageError("an API key is empty or has characters that a header cannot carry")


@dataclass(frozen=True, slots=True)
class Token:
    """One token of the answer. `text` may be empty: half a character waits for its other half."""

    id: int
    text: str
    source: Source
    logprob: float  # of the target's unmodified distribution
    round: int = 0  # that committed it, from 1
    top: tuple[tuple[int, float], ...] = ()  # the likeliest tokens here and their log-probabilities, where asked for


@dataclass(frozen=True, slots=True)
class Stats:
    """What one answer cost. Seconds are wall-clock."""

    prompt_tokens: int
    reused_tokens: int  # of the prompt, found in the KV cache
    new_tokens: int
    seconds: float
    ttft_seconds: float
    tokens_per_second: float  # new tokens / seconds, prompt included
    rounds: int
    tokens_per_round: float
    drafted: int  # guesses made
    verified: int  # guesses sent to the target
    accepted: int
    accepted_by_source: Mapping[str, int]
    target_busy_seconds: float
    draft_busy_seconds: float
    wait_seconds: float = 0.0  # that the target waited for guesses
    draft_faults: int = 0  # the draft worker died, stalled, spoke nonsense; the answer is the same without it
    draft_restarts: int = 0


@dataclass(frozen=True, slots=True)
class Result:
    """A whole answer."""

    text: str
    tokens: tuple[Token, ...]
    finish_reason: FinishReason
    mode: Mode
    speculation: str  # "on", or "off: why"
    stats: Stats

    @property
    def token_ids(self) -> list[int]:
        return [token.id for token in self.tokens]

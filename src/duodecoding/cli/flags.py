"""Flags, derived from frozen dataclasses: names, types and defaults come from the fields, help and short names from here.

Every flag `--some-name` can also be set by the environment variable `DUO_SOME_NAME`; the flag wins.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, Field, dataclass, field, fields, make_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, get_type_hints

from cyclopts import Group, Parameter

from duodecoding.errors import UsageError
from duodecoding.types import EngineConfig, SamplingParams, ServerConfig

T = TypeVar("T")

ENV_PREFIX = "DUO_"
SHORT = {"model": "-m", "draft": "-d", "max_tokens": "-n"}

ENGINE_HELP = {
    "model": "Target: a .gguf file, a directory, owner/repo[:QUANT] from the hub, or a built-in name (see duo models).",
    "draft": "Who guesses ahead: a model as above, lookup (text already seen), free (that and recycling), none, or auto.",
    "mode": "How target and draft share the work. The answer is the same in all of them.",
    "ctx_size": "Most tokens of prompt and answer together; never more than the model was trained for.",
    "threads": "Threads of the target. 0: one per physical core.",
    "threads_draft": "Threads of the draft. 0: as many as the target.",
    "gpu_layers": "Layers of the target on the GPU. -1: all.",
    "draft_length": "Guesses on one path; with a tree, draft steps per round.",
    "draft_width": "With a tree: leaves expanded per draft step at most.",
    "branching": "With a tree: guesses kept of an expanded leaf.",
    "max_nodes": "With a tree: most guesses verified in one pass.",
    "draft_at": "HOST:PORT of a draft server on another machine, instead of a draft here (modes lockstep and duo).",
    "draft_secret": "The secret that the draft server asks for. Better set by the environment variable, which others cannot see.",
    "turns": "In mode duo: the draft model works between the target's passes (on) or beside them (off). auto: beside, unless it "
    "shares few cores with the target.",
    "draft_engine": "What runs the draft. auto: our own engine where it can (Llama, Qwen 2 and 3), else llama.cpp.",
    "backend": "What runs the target. auto: torch for transformers models; for GGUF our own engine where it can, else llama.cpp.",
    "device": "torch: cpu, cuda or cuda:N. auto: a GPU if there is one.",
    "dtype": "torch: float32, bfloat16 or float16. auto: float32 on a CPU, bfloat16 on a GPU.",
    "compile": "torch: compile the model, for faster passes after a slower start. auto: on a GPU.",
    "warmup": "torch on a GPU: make ready for all sizes of a pass before the first answer.",
    "lookup_store": "Keep the text of conversations in this file and look up in it later. Anyone who can read it can read them.",
    "offline": "Never ask the hub, use only what is on this machine.",
}
SAMPLING_HELP = {
    "max_tokens": "Most tokens in the answer.",
    "temperature": "0: always the likeliest token. Higher: more varied.",
    "top_k": "Sample among the k likeliest tokens. 0: no limit.",
    "top_p": "Sample among the likeliest tokens that together have this probability.",
    "min_p": "Leave out tokens less likely than this share of the likeliest one.",
    "repetition_penalty": "Above 1: tokens of prompt and answer become less likely.",
    "presence_penalty": "Taken from the logit of every token that is in the answer already.",
    "frequency_penalty": "Taken from a token's logit once for each time it is in the answer.",
    "logit_bias": "Added to the logit of a token, as ID=BIAS. Repeatable; in the environment separated by spaces.",
    "seed": "Same seed, same answer.",
    "stop": "End the answer before this text. Repeatable; the environment variable holds one.",
    "ignore_eos": "Do not stop where the model wants to end.",
    "json_schema": "Answer with JSON that this JSON Schema, or the one in this file, admits. Needs llguidance (extra: server).",
}
KEEP_HELP = {"keep_mb": "Megabytes of memory for the KV caches of earlier conversations."}
SERVER_HELP = {
    "host": "Address to listen on. Beyond this machine set an API key.",
    "port": "Port to listen on. 0: any that is free.",
    "api_key": "What clients must know. Repeatable. Better set by the environment variable, which others cannot see.",
    "alias": "The model's name for clients, instead of its own.",
    "max_queue": "Requests that may wait for their turn. More are turned away with 429.",
    "parallel": "Answers at the same time: so many engines, each with models and memory of its own.",
    "cors_origins": "Origin of web pages that may ask, as in https://example.org, or *. Repeatable.",
    "request_timeout": "Seconds that a request may take, waiting included. 0: no limit.",
    "max_body_mb": "Megabytes that a request may have.",
}


@dataclass(frozen=True, slots=True)
class RunOptions:
    """How `duo run` reads and prints."""

    system: str = ""
    raw: bool = False
    stats: bool = False
    json: bool = False
    trace: str = ""


@dataclass(frozen=True, slots=True)
class ChatOptions:
    """How `duo chat` talks."""

    system: str = ""
    show_draft: bool = False
    url: str = ""
    api_key: str = field(default="", repr=False)


@dataclass(frozen=True, slots=True)
class ReportOptions:
    """How `duo models` and `duo doctor` print."""

    json: bool = False


@dataclass(frozen=True, slots=True)
class DraftServerOptions:
    """Where `duo draft-server` listens."""

    host: str = "127.0.0.1"
    port: int = 7777  # 0: any that is free
    secret: str = field(default="", repr=False)


@dataclass(frozen=True, slots=True)
class SimulateOptions:
    """What `duo simulate` plays through, and how it prints."""

    profile: str = "h200-7b"
    modes: str = "off,chain,serial,lockstep,duo,free"
    ablate: bool = False
    tasks: str = ""
    per_task: int = 2
    json: bool = False


@dataclass(frozen=True, slots=True)
class PairOptions:
    """What `duo pair` tries, and how it prints."""

    profile: str = "h200-7b"
    tasks: str = ""
    per_task: int = 0  # all
    replay: int = 1
    plot: str = ""
    json: bool = False


@dataclass(frozen=True, slots=True)
class ProfileOptions:
    """What `duo profile` makes of its measurements."""

    name: str = "here"
    plot: str = ""
    json: bool = False


@dataclass(frozen=True, slots=True)
class TraceOptions:
    """What `duo trace` draws."""

    out: str = ""
    from_: float = 0.0
    to: float = 0.0


SIMULATE_HELP = {
    "profile": "Machines, separated by commas: names of shipped profiles, or files made by duo profile --json.",
    "modes": "Separated by commas. free: the limit, the same draft at no cost; pearl: lockstep with one chain.",
    "ablate": "Also duo with one part taken out at a time.",
    "tasks": "A folder of .jsonl files with prompts, instead of the package's own.",
    "per_task": "Prompts of each task.",
    "json": "One JSON object a line for each profile, instead of tables.",
}
PAIR_HELP = {
    "profile": "Machines to predict a speed-up for, besides this one: names or files, separated by commas. none: this one alone.",
    "tasks": SIMULATE_HELP["tasks"],
    "per_task": "Prompts of each task. 0: all.",
    "replay": "Prompts of each task that are replayed in virtual time, for the prediction. 0: none.",
    "plot": "Draw the agreement by task into this PNG file.",
    "json": "One JSON object instead of tables.",
}
PROFILE_HELP = {
    "name": "What to call the profile.",
    "plot": "Draw both cost curves into this PNG file.",
    "json": "Print the profile as JSON, for duo simulate --profile FILE.",
}
TRACE_HELP = {
    "out": "The PNG file to write, instead of one beside the trace.",
    "from_": "Begin at this second.",
    "to": "End at this second. 0: at the end.",
}
DRAFT_SERVER_HELP = {
    "host": "Address to listen on. Beyond this machine a secret is needed.",
    "port": "Port to listen on. 0: any that is free.",
    "secret": "What engines must know. Better set by the environment variable, which others cannot see.",
}
DRAFT_MODEL_HELP = {**ENGINE_HELP, "threads": "Threads of the draft. 0: one per physical core."}
RUN_HELP = {
    "system": "System message, put before the prompt by the chat template.",
    "raw": "Give the model the prompt as it is, without its chat template.",
    "stats": "One line of statistics on stderr after the answer.",
    "json": "Print one JSON object instead of the text.",
    "trace": "Write the timeline of the answer to this JSON file, for Perfetto, chrome://tracing and duo trace.",
}
CHAT_HELP = {
    "system": "System message, put before the conversation by the chat template.",
    "show_draft": "Colour the tokens that were guessed, by who guessed them.",
    "url": "Talk to a server (duo serve) at this address instead of loading models here.",
    "api_key": "The key that the server asks for. Better set by the environment variable, which others cannot see.",
}
REPORT_HELP = {"json": "Print JSON instead of a table."}


def env_name(name: str) -> str:
    """The environment variable of a field."""
    return ENV_PREFIX + name.strip("_").upper()


def derive(cls: type, texts: Mapping[str, str], group: Group, only: tuple[str, ...] = (), **defaults: Any) -> type:
    """A dataclass with fields of `cls` (all, or `only` some) whose annotations tell cyclopts about help, names and environment.

    `defaults`: where a command starts from another value than the record."""
    hints = get_type_hints(cls)
    specs = [
        (
            f.name,
            Annotated[_typed(hints[f.name]), _parameter(f, hints[f.name], texts.get(f.name, ""), group)],
            _default(f, hints[f.name], defaults),
        )
        for f in fields(cls)
        if not only or f.name in only
    ]
    return make_dataclass(f"{cls.__name__}Flags", specs, frozen=True, kw_only=True, namespace={"__module__": __name__})


def _default(f: Field[Any], hint: Any, defaults: Mapping[str, Any]) -> Any:
    if f.name in defaults or _is_mapping(hint):
        return field(default=defaults.get(f.name, ()))
    return field(default=f.default) if f.default_factory is MISSING else field(default_factory=f.default_factory)


def _typed(hint: Any) -> Any:
    # A mapping is typed as words, ID=BIAS; `settings` reads them.
    return tuple[str, ...] if _is_mapping(hint) else hint


def _is_mapping(hint: Any) -> bool:
    return getattr(hint, "__origin__", None) is Mapping


def _parameter(f: Field[Any], hint: Any, text: str, group: Group) -> Parameter:
    extra: dict[str, Any] = {}
    if f.name in SHORT:
        extra["alias"] = SHORT[f.name]
    if hint == tuple[str, ...]:
        extra["env_var_split"] = _one_string
    return Parameter(
        help=text,
        env_var=env_name(f.name),
        group=group,
        negative=(),
        allow_leading_hyphen=hint is not bool,
        show_default=hint in (int, float) or bool(f.default_factory is MISSING and f.default),  # off and empty need no mention
        **extra,
    )


def _one_string(_type: object, value: str, **_kwargs: object) -> list[str]:
    # A stop string may hold spaces, so it is not split.
    return [value] if value else []


def settings(cls: type[T], flags: Any) -> T:
    """The frozen dataclass that the flags stand for. Its own checks run here."""
    values = {name: getattr(flags, name) for name in flags.__dataclass_fields__}
    hints = get_type_hints(cls)
    if values.get("json_schema"):
        values["json_schema"] = read_schema(values["json_schema"])
    return cls(**{name: read_bias(name, value) if _is_mapping(hints[name]) else value for name, value in values.items()})


def read_schema(text: str) -> str:
    """A JSON Schema, which is an object or, seldom, true or false; anything else names a file with one."""
    if text.lstrip()[:1] == "{" or text.strip() in ("true", "false"):
        return text
    try:
        return Path(text).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else "it is not a text file"
        raise UsageError(
            f"cannot read the JSON Schema {text!r}", reason, 'Give a schema, as in \'{"type": "object"}\', or a file.'
        ) from None


def read_bias(name: str, words: tuple[str, ...] | Mapping[int, float]) -> dict[int, float]:
    if isinstance(words, Mapping):
        return dict(words)
    pairs = {}
    for word in words:
        token, _, bias = word.partition("=")
        try:
            pairs[int(token)] = float(bias)
        except ValueError:
            raise UsageError(f"{name} is {word!r}", "it must be a token id, '=' and a number, as in 42=-5") from None
    return pairs


def takes_value(token: str) -> bool:
    """Whether the word after this flag belongs to it."""
    return token in _VALUE_FLAGS


def _value_flags() -> set[str]:
    talking = (EngineConfig, SamplingParams, ServerConfig, RunOptions, ChatOptions, DraftServerOptions)
    records = (*talking, SimulateOptions, PairOptions, ProfileOptions, TraceOptions)
    names = {name for record in records for name, hint in get_type_hints(record).items() if hint is not bool}
    return {"--" + name.strip("_").replace("_", "-") for name in names} | set(SHORT.values())


_VALUE_FLAGS = _value_flags()

FLAT = Parameter(name="*")  # the fields of the record are flags of the command
OUTPUT = Group("Input and output", sort_key=0)
ANSWER = Group("Answer", sort_key=1)
ENGINE = Group("Models and speculation", sort_key=2)
PAIR = ("model", "draft", "ctx_size", "threads", "threads_draft", "draft_engine", "offline")  # two models on this machine
SERVED = ("max_tokens", "temperature", "top_k", "top_p", "min_p", "repetition_penalty")  # where a request says nothing
REPLAYED = ("max_tokens", "temperature", "top_p", "seed")

if TYPE_CHECKING:
    EngineFlags = EngineConfig
    ServerFlags = ServerConfig
    ServedEngineFlags = EngineConfig
    ServedSamplingFlags = SamplingParams
    SamplingFlags = SamplingParams
    RunFlags = RunOptions
    ChatFlags = ChatOptions
    ReportFlags = ReportOptions
    MachineFlags = EngineConfig
    SimulateFlags = SimulateOptions
    ProfileFlags = ProfileOptions
    TraceFlags = TraceOptions
    PairFlags = EngineConfig
    DeviceFlags = EngineConfig
    PairReportFlags = PairOptions
    PairEngineFlags = EngineConfig
    LengthFlags = SamplingParams
    ReplayFlags = SamplingParams
    DraftServerFlags = DraftServerOptions
    DraftModelFlags = EngineConfig
else:
    EngineFlags = derive(EngineConfig, ENGINE_HELP, ENGINE, only=tuple(ENGINE_HELP))
    SamplingFlags = derive(SamplingParams, SAMPLING_HELP, ANSWER, only=tuple(SAMPLING_HELP))
    ServerFlags = derive(ServerConfig, SERVER_HELP, OUTPUT)
    ServedEngineFlags = derive(EngineConfig, ENGINE_HELP | KEEP_HELP, ENGINE, keep_mb=1024)
    ServedSamplingFlags = derive(SamplingParams, SAMPLING_HELP, ANSWER, only=SERVED, max_tokens=4096)
    RunFlags = derive(RunOptions, RUN_HELP, OUTPUT)
    ChatFlags = derive(ChatOptions, CHAT_HELP, OUTPUT)
    ReportFlags = derive(ReportOptions, REPORT_HELP, OUTPUT)
    DraftServerFlags = derive(DraftServerOptions, DRAFT_SERVER_HELP, OUTPUT)
    DraftModelFlags = derive(EngineConfig, DRAFT_MODEL_HELP, ENGINE, only=("ctx_size", "threads", "draft_engine", "offline"))
    MACHINE = ("threads", "gpu_layers", "backend", "device", "dtype", "compile", "offline")
    MachineFlags = derive(EngineConfig, ENGINE_HELP, ENGINE, only=MACHINE)
    SimulateFlags = derive(SimulateOptions, SIMULATE_HELP, OUTPUT)
    ProfileFlags = derive(ProfileOptions, PROFILE_HELP, OUTPUT)
    TraceFlags = derive(TraceOptions, TRACE_HELP, OUTPUT)
    PairFlags = derive(EngineConfig, ENGINE_HELP, ENGINE, only=PAIR)
    DEVICE = (*PAIR, "gpu_layers", "backend", "device", "dtype", "compile")
    DeviceFlags = derive(EngineConfig, ENGINE_HELP, ENGINE, only=DEVICE)
    PairReportFlags = derive(PairOptions, PAIR_HELP, OUTPUT)
    PairEngineFlags = derive(EngineConfig, ENGINE_HELP, ENGINE, only=tuple(n for n in DEVICE if n not in ("model", "draft")))
    LengthFlags = derive(SamplingParams, SAMPLING_HELP, ANSWER, only=("max_tokens",), max_tokens=128)
    ReplayFlags = derive(SamplingParams, SAMPLING_HELP, ANSWER, only=REPLAYED, max_tokens=128)

NO_ENGINE_FLAGS = EngineFlags()
NO_SAMPLING_FLAGS = SamplingFlags()
NO_SERVER_FLAGS = ServerFlags()
NO_SERVED_ENGINE_FLAGS = ServedEngineFlags()
NO_SERVED_SAMPLING_FLAGS = ServedSamplingFlags()
NO_RUN_FLAGS = RunFlags()
NO_CHAT_FLAGS = ChatFlags()
NO_REPORT_FLAGS = ReportFlags()
NO_MACHINE_FLAGS = MachineFlags()
NO_SIMULATE_FLAGS = SimulateFlags()
NO_PROFILE_FLAGS = ProfileFlags()
NO_TRACE_FLAGS = TraceFlags()
NO_PAIR_FLAGS = PairFlags()
NO_DEVICE_FLAGS = DeviceFlags()
NO_PAIR_REPORT_FLAGS = PairReportFlags()
NO_PAIR_ENGINE_FLAGS = PairEngineFlags()
NO_LENGTH_FLAGS = LengthFlags()
NO_DRAFT_SERVER_FLAGS = DraftServerFlags()
NO_DRAFT_MODEL_FLAGS = DraftModelFlags()
NO_REPLAY_FLAGS = ReplayFlags()

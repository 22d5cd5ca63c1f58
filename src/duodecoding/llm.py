"""LLM: load a pair, generate, stream, chat. The Python front door."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from duodecoding import backends, launch, measure, models, remote
from duodecoding.backends.base import Target, Vocabulary
from duodecoding.costs import Floor, Profile, from_record, to_record
from duodecoding.drafters.bridge import BridgeDrafter
from duodecoding.drafters.lookup import LookupDrafter
from duodecoding.drafters.model import ModelDrafter
from duodecoding.drafters.recycling import RecyclingDrafter
from duodecoding.drafters.store import Store
from duodecoding.drafting import Drafters
from duodecoding.errors import ContextOverflow, UsageError
from duodecoding.grammar import Grammars
from duodecoding.model_files import ModelFile, size_of
from duodecoding.pace import Pace
from duodecoding.planner import Switch, cores_for_draft
from duodecoding.remote import RemoteDrafter
from duodecoding.sampling import Constraint
from duodecoding.stream import OVERLAPPING, Stream
from duodecoding.text import difference, render_chat
from duodecoding.types import FREE_DRAFTS, EngineConfig, Mode, Result, SamplingParams

Message = Mapping[str, str]
Progress = Callable[[str, float], None]  # what is being done, share done
LoadTarget = Callable[[Path, EngineConfig, Progress], Target]
FEWEST_CORES = 4  # for two models on one CPU at the same time
LARGEST_IN_TURN = 0.2  # of the target's file: a draft that takes turns with it. A target that a larger one suits is fast itself
LIMIT_IN_TURN = 6.0  # tokens lost before drafting in turns pauses for the first time
TOO_FEW = "free guesses only, {cores} cores are too few for a draft model of this size beside a target on the CPU (--turns on, or \
--threads-draft, forces it)"
IN_TURN = "draft and target take turns, there are too few cores for both at once"
MOST_DRAFT_THREADS = 12  # of a small model more threads only wait for each other (benchmarks/results/draft_shapes_xeon.json)
BRIDGED = "through text, the vocabularies differ"


class LLM:
    """A target with its drafters, ready to answer. One answer at a time.

    >>> with LLM("smollm2-135m", draft="lookup") as llm:  # doctest: +SKIP
    ...     print(llm.chat([{"role": "user", "content": "Hello"}]).text)
    """

    def __init__(self, model: str | None = None, *, progress: Progress | None = None, **settings: Any) -> None:
        """`settings` are the fields of `EngineConfig`: draft, mode, ctx_size, threads, …"""
        known = EngineConfig.__dataclass_fields__
        for name in settings:
            if name not in known:
                raise UsageError(f"unknown setting {name!r}", f"the settings are {', '.join(known)}")
        chosen = settings if model is None else {"model": model, **settings}
        self._load(EngineConfig(**chosen), progress or (lambda what, share: None))

    @classmethod
    def from_config(cls, config: EngineConfig, *, progress: Progress | None = None, load_target: LoadTarget | None = None) -> Self:
        """`load_target`: where the target comes from instead of its file, such as another engine that has it already."""
        llm = cls.__new__(cls)
        llm._load(config, progress or (lambda what, share: None), load_target)
        return llm

    @classmethod
    def of(cls, target: Target, drafters: Drafters, config: EngineConfig) -> Self:
        """Around models that are loaded already."""
        llm = cls.__new__(cls)
        llm._assemble(target, drafters, config, model_name="target", draft_name=None)
        return llm

    def _load(self, config: EngineConfig, progress: Progress, load_target: LoadTarget | None = None) -> None:
        file = models.resolve(config.model, offline=config.offline)
        if config.gpu_layers == 0 and backends.on_gpu(file.path, config):
            config = replace(config, gpu_layers=-1)  # a torch target; what follows asks only for this
        draft_name = _draft_name(config)
        vocabulary = backends.read_vocabulary(file.path)
        draft_file = _draft_file(config, draft_name)
        config, note = _with_turns(config, file.path, draft_file.path if draft_file else None)
        bridged = False
        if note == TOO_FEW:
            draft_name, draft_file, note = "free", None, TOO_FEW.format(cores=_cores())
        if draft_file is not None:
            progress(f"comparing the vocabularies of {file.name} and {draft_file.name}", 0.0)
            other = backends.read_vocabulary(draft_file.path)
            bridged = bool(difference(vocabulary, other, target_name=file.name, draft_name=draft_file.name))
            note = "; ".join(filter(None, (BRIDGED if bridged else "", note)))
            config = share_threads(config)
            draft_name = draft_file.name
        progress(f"loading {draft_name or file.name}", 0.1)
        bridge = file.path if bridged else None
        drafters = _drafters(config, draft_name, draft_file.path if draft_file else None, vocabulary, bridge)
        try:
            progress(f"loading {file.name}", 0.4)
            target = (load_target or backends.load_target)(file.path, config, progress)
        except BaseException:
            drafters.close()
            raise
        self._assemble(target, drafters, config, file.name, draft_name, note)
        if config.mode is not Mode.OFF:
            progress("measuring what a pass costs here", 0.9)
            self._pace = self._measured(file.path, draft_file.path if draft_file else None)
            self._pace.switch = self._switch()
        if target.overlaps:  # a look for garbage among all that loading left behind takes half a second, in the midst of an answer
            gc.collect()
            gc.freeze()
        progress("ready", 1.0)

    def _measured(self, target: Path, draft: Path | None) -> Pace:
        """What `duo profile` stored for this pair and machine, else a first look at the target that takes a moment."""
        stored = measure.load(measure.key(measure.facts(self.config, target, draft, engine=self._target.engine)))
        if stored is not None:
            return Pace(_for_turns(stored) if self.in_turn else stored)
        model = self._drafters.model if self.in_turn else None
        steps = measure.quick_turns(self._target, model.draft) if model is not None else None
        return Pace(verify=measure.quick_verify(self._target), draft=steps, on_gpu=self.config.gpu_layers != 0)

    def _assemble(
        self, target: Target, drafters: Drafters, config: EngineConfig, model_name: str, draft_name: str | None, note: str = ""
    ) -> None:
        self.config = config
        self.model_name, self.draft_name = model_name, draft_name
        self.context = target.context
        self.vocabulary = target.vocabulary
        self._target, self._drafters = target, drafters
        self._pace = Pace(on_gpu=config.gpu_layers != 0)
        self._stream: Stream | None = None
        self._closed = False
        self._note = note  # what a person should know although speculation is on

    @property
    def target(self) -> Target:
        return self._target

    @property
    def drafters(self) -> Drafters:
        return self._drafters

    def with_settings(self, **changes: Any) -> Self:
        """The same models and what is known of their costs, under other settings."""
        return self._like(self._target, replace(self.config, **changes))

    def on(self, target: Target) -> Self:
        """The same drafters, settings and what is known of costs, with another target, which is the same model."""
        return self._like(target, self.config)

    def _like(self, target: Target, config: EngineConfig) -> Self:
        other = type(self).of(target, self._drafters, config)
        other._pace = self._pace
        return other

    def use_costs(self, costs: Profile) -> None:
        """Plan with these; every round refines a copy of them."""
        own = from_record(to_record(costs), where=costs.name)
        self._pace = Pace(_for_turns(own) if self.in_turn else own)
        self._pace.switch = self._switch()

    def _switch(self) -> Switch:
        """In turns a round in vain costs several times what it does beside a target, so as much bad luck takes a larger loss."""
        return Switch(limit=LIMIT_IN_TURN) if self.in_turn else Switch()

    @property
    def in_turn(self) -> bool:
        """Does a draft model work between the target's passes in mode duo?"""
        return self.config.mode is Mode.DUO and self._drafters.model is not None

    @property
    def speculation(self) -> str:
        """ "on", or "off" and why."""
        if self.config.mode is Mode.OFF:
            return "off: the mode is off"
        drafters = self._drafters
        if drafters.remote is not None and drafters.remote.given_up and drafters.lookup is None:
            return f"off: the draft worker failed {remote.MAX_FAILURES} times: {drafters.remote.last_error}"
        if drafters.model is None and drafters.lookup is None and drafters.remote is None:
            return "off: there is no draft"
        return f"on: {self._note}" if self._note else "on"

    @property
    def modes(self) -> tuple[Mode, ...]:
        """Those that the loaded drafters can work in."""
        drafters = self._drafters
        if drafters.remote is not None:
            return Mode.OFF, *OVERLAPPING
        if drafters.model is not None:
            in_turns = (Mode.OFF, Mode.CHAIN, Mode.SERIAL)
            return (*in_turns, Mode.DUO) if self.config.turns == "on" else in_turns
        return tuple(Mode) if drafters.lookup is not None else (Mode.OFF,)

    def generate(self, prompt: str | Sequence[int], params: SamplingParams | None = None) -> Result:
        """Continue a text (or token ids) as it is, without a chat template."""
        return self.stream(prompt, params).run()

    def stream(self, prompt: str | Sequence[int], params: SamplingParams | None = None) -> Stream:
        """The same, token by token. Close it to stop early."""
        ids = self.vocabulary.tokenize(prompt, special=True, bos=True) if isinstance(prompt, str) else list(prompt)
        return self._answer(ids, params or SamplingParams())

    def chat(self, messages: Sequence[Message], params: SamplingParams | None = None) -> Result:
        """Answer the last of `messages` ({"role", "content"}) through the model's chat template."""
        return self.stream_chat(messages, params).run()

    def stream_chat(self, messages: Sequence[Message], params: SamplingParams | None = None) -> Stream:
        return self._answer(self.chat_tokens(messages), params or SamplingParams())

    def chat_tokens(self, messages: Sequence[Message]) -> list[int]:
        """The prompt that a conversation becomes."""
        vocabulary = self.vocabulary
        text = render_chat(
            vocabulary.chat_template, messages, bos=vocabulary.bos_text, eos=vocabulary.eos_text, model=self.model_name
        )
        has_bos = bool(vocabulary.bos_text) and text.startswith(vocabulary.bos_text)
        return vocabulary.tokenize(text, special=True, bos=not has_bos)

    def _answer(self, prompt: list[int], params: SamplingParams) -> Stream:
        if self._closed:
            raise UsageError("this LLM is closed")
        if self._stream is not None and self._stream.running:
            raise UsageError("another answer is still running", "one LLM gives one answer at a time", "Finish or close its stream.")
        self.check_prompt(prompt)
        constraint = self.constraint(params)
        self._stream = Stream(self._target, self._drafters, self.config, self._pace, self.speculation, prompt, params, constraint)
        return self._stream

    def constraint(self, params: SamplingParams) -> Constraint | None:
        """What the answer may be. A schema that cannot be followed is a `UsageError`."""
        return self._grammars.constraint(params.json_schema) if params.json_schema else None

    @cached_property
    def _grammars(self) -> Grammars:
        return Grammars(self.vocabulary)

    def check_prompt(self, prompt: Sequence[int]) -> None:
        if not prompt:
            raise UsageError("the prompt is empty")
        bad = [token for token in prompt if not 0 <= token < self.vocabulary.size]
        if bad:
            raise UsageError(f"the prompt has token id {bad[0]}", f"ids go from 0 to {self.vocabulary.size - 1}")
        if len(prompt) >= self.context:
            raise ContextOverflow(len(prompt), self.context - 1, self.context)

    def floor(self) -> Floor | None:
        """The least time of a pass here, from a copy in memory that takes a moment. None: it cannot be measured."""
        config = self.config
        return measure.floor(self._target, on_gpu=config.gpu_layers != 0, device=config.device, threads=config.threads)

    def abort(self) -> None:
        """Stop the running answer as soon as possible. Callable from a signal handler or another thread."""
        if self._stream is not None and self._stream.running:
            self._stream.cancelled = True
            self._target.abort()

    def close(self) -> None:
        if not self._closed:
            if self._stream is not None:
                self._stream.close()
            self._drafters.close()
            if self._target.overlaps:
                gc.unfreeze()
            self._target.close()
            self._closed = True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def _draft_name(config: EngineConfig) -> str | None:
    if config.mode is Mode.OFF or config.draft == "none":
        return None
    if config.draft_at:
        return _draft_server_name(config)
    if config.draft == "auto":
        return models.default_draft(config.model) or "free"
    return config.draft


def _draft_server_name(config: EngineConfig) -> str:
    if config.mode not in OVERLAPPING:
        why = f"in mode {config.mode} draft and target take turns in one process"
        raise UsageError("a draft server was given", why, "Choose --mode duo, or leave out --draft-at.")
    if config.draft != "auto":
        raise UsageError(f"both a draft ({config.draft}) and a draft server ({config.draft_at})", fix="Leave one out.")
    return f"draft server {config.draft_at}"


def _draft_file(config: EngineConfig, name: str | None) -> ModelFile | None:
    """The draft model on this machine. None: there is none."""
    if name is None or name in FREE_DRAFTS or config.draft_at:
        return None
    return models.resolve(name, offline=config.offline)


def _with_turns(config: EngineConfig, target: Path, draft: Path | None) -> tuple[EngineConfig, str]:
    """Whether a draft model works beside the target or in turns with it, and what a person should know of that: `TOO_FEW`, that it
    cannot work at all. Both on a few cores take turns if the draft is small enough. Whoever sets threads knows better."""
    if config.mode is not Mode.DUO and config.turns == "on":
        raise UsageError("--turns is on", f"mode {config.mode} has its own order of work", "Choose --mode duo, or leave it out.")
    if config.draft_at and config.turns == "on":
        raise UsageError("--turns is on", "a draft server works while the target does", "Leave out --turns or --draft-at.")
    if draft is None or config.mode not in OVERLAPPING or config.turns != "auto":
        return config, IN_TURN if draft is not None and config.turns == "on" else ""
    if config.gpu_layers != 0 or config.threads or config.threads_draft or _cores() >= FEWEST_CORES:
        return replace(config, turns="off"), ""
    if config.mode is Mode.DUO and size_of(draft) <= LARGEST_IN_TURN * size_of(target):
        return replace(config, turns="on"), IN_TURN
    return replace(config, turns="off"), TOO_FEW


def _for_turns(costs: Profile) -> Profile:
    """Draft steps at what they take between two passes."""
    return replace(costs, draft=costs.draft_in_turn)


def _cores() -> int:
    from duodecoding.backends.llamacpp import physical_cores

    return physical_cores()


def share_threads(config: EngineConfig) -> EngineConfig:
    """Both models on one CPU at the same time: more threads than cores would make each wait for the other's. Beside a GPU a draft
    has the same threads in all modes."""
    if (not config.beside and config.gpu_layers == 0) or config.threads or config.threads_draft:
        return config
    cores = _cores()
    if config.gpu_layers != 0:
        return replace(config, threads=1, threads_draft=max(1, min(cores - 2, MOST_DRAFT_THREADS)))
    draft = max(1, cores // 4)
    return replace(config, threads=max(1, cores - draft), threads_draft=draft)


def _drafters(config: EngineConfig, name: str | None, path: Path | None, vocabulary: Vocabulary, bridge: Path | None) -> Drafters:
    """`bridge`: the target's file, if the draft has to guess through text."""
    if name is None:
        return Drafters()
    if name in FREE_DRAFTS:
        return _free_drafters(config, vocabulary, recycling=name == "free")
    # The published schemes stay as published; guesses that cost nothing belong to duo.
    free = _free_drafters(config, vocabulary, noisy=bridge is None) if config.mode is Mode.DUO else Drafters()
    if path is None:
        worker = RemoteDrafter(launch.connect(config.draft_at), vocabulary.size, secret=config.draft_secret)
    elif config.beside:
        worker = RemoteDrafter(launch.spawn(path, config, cores=_draft_cores(config), bridge=bridge), vocabulary.size)
    else:
        draft = backends.load_draft(path, config)
        model = BridgeDrafter(draft, vocabulary) if bridge else ModelDrafter(draft, vocab_limit=vocabulary.size)
        return replace(free, model=model)
    worker.start()  # it loads its model while the caller goes on
    return replace(free, remote=worker)


def _free_drafters(config: EngineConfig, vocabulary: Vocabulary, *, recycling: bool = True, noisy: bool = True) -> Drafters:
    """`noisy`: the draft model beside them adds the noise of a temperature."""
    store = Store(Path(config.lookup_store), vocabulary) if config.lookup_store else None
    return Drafters(lookup=LookupDrafter(store), recycling=RecyclingDrafter(noisy=noisy) if recycling else None)


def _draft_cores(config: EngineConfig) -> list[int]:
    """Where the worker may run. Empty: anywhere."""
    if config.gpu_layers == 0 or not hasattr(os, "sched_getaffinity"):
        return []
    return cores_for_draft(sorted(os.sched_getaffinity(0)), target_on_gpu=True)[1]

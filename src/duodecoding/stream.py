"""Stream: one answer under way, token by token. Made by `LLM`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from duodecoding.backends.base import Target
from duodecoding.between import Between
from duodecoding.core import Committed, DuoCore
from duodecoding.drafting import Drafters, growth_of, growth_plan
from duodecoding.errors import Interrupted, UsageError
from duodecoding.pace import Pace
from duodecoding.planner import tokens_unread
from duodecoding.realtime import Meter, Overlap, take_turns
from duodecoding.remote import RemoteDrafter
from duodecoding.sampling import Constraint
from duodecoding.text import Detokenizer, StopStrings
from duodecoding.trace import Timeline
from duodecoding.types import EngineConfig, Mode, Result, SamplingParams, Stats, Token

OVERLAPPING = (Mode.LOCKSTEP, Mode.DUO)  # the draft works beside the target, in a process of its own


class Reader:
    """Turns the answer's tokens into text as the core commits them, and tells it where a stop string ends the answer."""

    def __init__(self, piece: Callable[[int], bytes], stops: Sequence[str]) -> None:
        self._detokenizer = Detokenizer(piece)
        self._stops = StopStrings(stops)
        self._can_stop = bool(stops)
        self._stopped = False
        self._tokens: list[int] = []  # since the last `take`; without stop strings nobody needs their text before that
        self._texts: list[str] = []

    def __call__(self, token: int) -> bool:
        self._tokens.append(token)
        if self._can_stop:
            self._read()
        return self._stopped

    def _read(self) -> None:
        for token in self._tokens[len(self._texts) :]:
            text, self._stopped = self._stops.feed(self._detokenizer.feed(token))
            self._texts.append(text)

    def take(self, count: int, *, last: bool) -> list[str]:
        """Texts of the last `count` tokens. An end token has none; the last token gets what was held back."""
        self._read()
        texts = self._texts + [""] * (count - len(self._texts))
        self._tokens, self._texts = [], []
        if last and not self._stopped and texts:
            more, stopped = self._stops.feed(self._detokenizer.flush())
            texts[-1] += more if stopped else more + self._stops.flush()
        return texts


class Stream:
    """An answer under way: iterate over its tokens, close it to stop early, `result` once it has ended."""

    def __init__(
        self,
        target: Target,
        drafters: Drafters,
        config: EngineConfig,
        pace: Pace,
        speculation: str,
        prompt: list[int],
        params: SamplingParams,
        constraint: Constraint | None = None,
    ) -> None:
        self.running, self.cancelled = True, False
        self._tokens: list[Token] = []
        self._unread: list[Token] = []  # of the last round, last first
        self._constraint = constraint
        self._mode, self._speculation = config.mode, speculation
        self._prompt_tokens = len(prompt)
        self._reader = Reader(target.vocabulary.piece, params.stop)
        self._core = DuoCore(
            prompt,
            params,
            config,
            context=target.context,
            end_tokens=target.vocabulary.end_tokens,
            stop=self._reader,
            drafts=drafters.model is not None,
            costs=pace.costs,
            switch=pace.switch,
            free_switch=pace.free_switch,
        )
        self._meter = Meter()
        self._reused = 0
        self._worker = drafters.remote if config.mode in OVERLAPPING else None
        self._faults = self._restarts = 0
        self._rounds = self._run(target, drafters, config, pace, prompt, params)

    def _run(
        self, target: Target, drafters: Drafters, config: EngineConfig, pace: Pace, prompt: list[int], params: SamplingParams
    ) -> Iterator[list[Token]]:
        worker = self._worker
        faults, restarts = (worker.faults, worker.restarts) if worker is not None else (0, 0)
        try:
            for gained in self._answer(target, drafters, config, pace, prompt, params):
                yield self._read(gained)
                if self.cancelled:
                    break
        except Interrupted:
            pass
        finally:
            self._core.cancel()
            self._meter.finish()
            if worker is not None:
                self._faults, self._restarts = worker.faults - faults, worker.restarts - restarts
                self._speculation = self._how_it_went(worker)
            self.running = False

    def _how_it_went(self, worker: RemoteDrafter) -> str:
        """A worker may have been of no use all through this answer; then it was not "on"."""
        if not self._speculation.startswith("on") or self._core.drafted > 0:
            return self._speculation
        if self._faults or (worker.last_error and not worker.alive):
            return f"off: the draft worker failed: {worker.last_error}"
        return "off: it did not pay lately" if worker.alive and not self._core.drafting else "off: the draft worker was not ready"

    def _answer(
        self, target: Target, drafters: Drafters, config: EngineConfig, pace: Pace, prompt: list[int], params: SamplingParams
    ) -> Iterator[list[Committed]]:
        core, meter, worker = self._core, self._meter, self._worker
        conversation = target.open(prompt, params)
        if self._constraint is not None:
            conversation.sampler.constraint = self._constraint
        self._reused = conversation.reused
        unread = tokens_unread(len(prompt), pace.costs.verify_cost(1, len(prompt)), pace.costs.draft_prompt)
        if worker is None and config.mode is Mode.DUO and drafters.model is not None:
            free = drafters.free
            free.open(prompt, params, growth_of(config))
            between = Between(core, drafters.model, free, config, pace, meter.timeline, prompt, params)
            return take_turns(core, target, conversation, free, meter, pace, between)
        if worker is None:
            if core.uses_drafts:
                drafters.open(prompt, params, growth_of(config), unread)
            return take_turns(core, target, conversation, drafters, meter, pace)
        lockstep = config.mode is Mode.LOCKSTEP
        free = Drafters() if lockstep else drafters.free

        def start_drafting() -> None:
            growth = growth_plan(config, pace.costs, len(prompt), unread)
            worker.open(prompt, params, growth, unread=unread, grow=core.drafting)
            free.open(prompt, params, growth_of(config))

        both = Overlap(core, target, conversation, worker, free, meter, pace, lockstep=lockstep, unread=unread)
        return both.rounds(start_drafting)

    def _read(self, gained: Sequence[Committed]) -> list[Token]:
        number, texts = self._core.rounds, self._reader.take(len(gained), last=self._core.finish_reason is not None)
        tokens = [Token(c.token, text, c.source, c.logprob, number, c.top) for c, text in zip(gained, texts, strict=True)]
        self._tokens += tokens  # all of the round, also if the reader stops in its middle
        return tokens

    def __iter__(self) -> Iterator[Token]:
        return self

    def __next__(self) -> Token:
        if not self._unread:
            self._unread = next(self._rounds)[::-1]
        return self._unread.pop()

    def rounds(self) -> Iterator[list[Token]]:
        """The same tokens, those of each round together."""
        return self._rounds

    def close(self) -> None:
        """Stop here. What was said so far stays in `result`."""
        self._rounds.close()  # type: ignore[attr-defined]
        self._unread = []
        self._core.cancel()
        self.running = False

    @property
    def timeline(self) -> Timeline:
        """What target and draft did so far, and when."""
        return self._meter.timeline

    def run(self) -> Result:
        for _ in self:
            pass
        return self.result

    @property
    def result(self) -> Result:
        if self.running:
            raise UsageError("the answer is not complete", fix="Iterate to the end or close the stream first.")
        text = "".join(token.text for token in self._tokens)
        assert self._core.finish_reason is not None
        return Result(text, tuple(self._tokens), self._core.finish_reason, self._mode, self._speculation, self._stats())

    def _stats(self) -> Stats:
        core, meter = self._core, self._meter
        new, seconds = len(self._tokens), meter.seconds
        return Stats(
            prompt_tokens=self._prompt_tokens,
            reused_tokens=self._reused,
            new_tokens=new,
            seconds=seconds,
            ttft_seconds=(meter.first_token or meter.started) - meter.started,
            tokens_per_second=new / seconds if seconds > 0 else 0.0,
            rounds=core.rounds,
            tokens_per_round=new / core.rounds if core.rounds else 0.0,
            drafted=core.drafted,
            verified=core.verified,
            accepted=core.accepted,
            accepted_by_source={str(source): n for source, n in core.accepted_by_source.items()},
            target_busy_seconds=meter.target_busy,
            draft_busy_seconds=meter.draft_busy,
            wait_seconds=meter.waited,
            draft_faults=self._faults,
            draft_restarts=self._restarts,
        )

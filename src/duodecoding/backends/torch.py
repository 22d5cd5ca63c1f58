"""transformers models as the target: compiled, one CUDA graph per shape, guesses verified as a tree.

The whole of a pass happens on the device, sampling included; what comes back is one token and one log-probability for each node.
A pass that reads a prompt gives the root's token only. If a guess was right there, its nodes get a pass of their own: the
root's logits then come from the same arithmetic in every mode.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from duodecoding.backends import torch_model
from duodecoding.backends.base import Conversation, Vocabulary
from duodecoding.backends.choosing import only_one
from duodecoding.backends.shelf import Shelf
from duodecoding.backends.torch_choices import Chooser, Voice
from duodecoding.backends.torch_inputs import Rows
from duodecoding.backends.torch_runner import Progress, Runner
from duodecoding.core import Choose
from duodecoding.errors import Interrupted, ModelUnreadable
from duodecoding.sampling import Choice
from duodecoding.tree import ROOT, PassNode
from duodecoding.types import EngineConfig, SamplingParams

MAX_ROWS = 128  # the root and its guesses
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.02}  # of a logit, relative to the largest


def load(path: Path, vocabulary: Vocabulary, config: EngineConfig, progress: Progress) -> TorchTarget:
    """A target from a directory of transformers files or a GGUF file."""
    with torch_model.leaving_nothing(f"cannot load {path}"):
        return _load(path, vocabulary, config, progress)


def _load(path: Path, vocabulary: Vocabulary, config: EngineConfig, progress: Progress) -> TorchTarget:
    device = torch_model.choose_device(config.device)
    dtype = torch_model.choose_dtype(config.dtype, device)
    if device.type == "cpu" and config.threads:
        torch.set_num_threads(config.threads)
    rows = min(config.max_nodes + 1, MAX_ROWS)
    model = torch_model.load_model(path, device, dtype, config.ctx_size, rows)
    compiled = config.compile == "on" or (config.compile == "auto" and device.type == "cuda")
    target = TorchTarget(
        model, vocabulary, context=config.ctx_size, rows=rows, compile=compiled, keep_bytes=config.keep_mb * 1_000_000
    )
    target.prepare(config.warmup, progress)
    return target


class TorchConversation:
    def __init__(self, target: TorchTarget, prompt: Sequence[int], params: SamplingParams) -> None:
        self.tokens = list(prompt)
        self.voice = Voice(params, prompt, target.vocabulary.size)
        self.sampler = self.voice.sampler
        self.cached = 0  # committed tokens in their slots, always the first ones
        self.reused = 0
        self.nodes: Sequence[PassNode] = ()  # that lie in the slots behind the committed tokens
        self.asked: list[int] = []  # of these, whose token the engine wanted to know: the accepted path
        self._target = target

    def commit(self, tokens: Sequence[int]) -> None:
        end, path = len(self.tokens), list[int]()
        for token, found in zip(tokens, self.asked, strict=False):
            if self.nodes[found] != (path[-1] if path else ROOT, token):
                break
            path.append(found)
        self._target.keep(self, tokens, [end + i for i in path])
        self.tokens.extend(tokens)
        self.nodes, self.asked = (), []

    def note(self, node: int) -> int:
        """The engine asks for the token after this node of the pass."""
        if node != ROOT:
            self.asked.append(node)
        return node


class TorchTarget:
    """The model whose answer it is. One conversation at a time owns the slots; another one takes over what they share."""

    engine = "torch"

    def __init__(
        self,
        model: Any,
        vocabulary: Vocabulary,
        *,
        context: int,
        rows: int = MAX_ROWS,
        compile: bool = False,
        kernels: bool = True,
        keep_bytes: int = 0,
    ) -> None:
        """`rows` of a pass at most. `kernels`: on a GPU in half precision our own, which make the answer equal in all modes."""
        self.vocabulary = vocabulary
        self.context = torch_model.usable_context(model.config.get_text_config(), context)
        self.weights_bytes = torch_model.weights_bytes(model)
        self._runner = Runner(model, self.context, rows, compile=compile, kernels=kernels)
        torch_model.SERVED.add(self._runner)
        self._runner.slots.check = self._stop_if_asked
        self.overlaps = self._runner.graphs
        self.pass_sizes: Sequence[int] = self._runner.node_buckets if self._runner.graphs else ()
        self._chooser = Chooser(self._runner.device, vocabulary.size, self._runner.stream)
        self._owner: TorchConversation | None = None
        self._shelf = Shelf(keep_bytes, self._save, self._load)
        self._stopped = False

    def _save(self) -> torch.Tensor:
        return self._runner.slots.save(self._owner.cached if self._owner is not None else 0)

    def _load(self, kept: torch.Tensor) -> None:
        self._runner.slots.load(kept)

    def _stop_if_asked(self) -> None:
        if self._stopped:
            self._stopped = False
            raise Interrupted("the pass was stopped")

    def open(self, prompt: Sequence[int], params: SamplingParams) -> TorchConversation:
        self._stopped = False  # one that came between two passes of the last answer
        conversation = TorchConversation(self, prompt, params)
        self._attach(conversation)
        conversation.reused = conversation.cached
        return conversation

    def _attach(self, conversation: TorchConversation) -> None:
        if self._owner is not conversation:
            held = self._owner.tokens[: self._owner.cached] if self._owner is not None else []
            conversation.cached = self._shelf.change(held, conversation.tokens)
            conversation.nodes, conversation.asked = (), []
            if self._owner is not None:
                self._owner.cached = 0
            self._owner = conversation
        conversation.cached = min(conversation.cached, len(conversation.tokens) - 1)

    def keep(self, conversation: TorchConversation, tokens: Sequence[int], slots: Sequence[int]) -> None:
        """`tokens` are committed now; the entries of the first of them lie in `slots`."""
        self._chooser.commit(conversation.voice, tokens)
        end = len(conversation.tokens)
        if self._owner is not conversation or conversation.cached != end:
            return
        moves = [(slot, to) for to, slot in enumerate(slots, end) if slot != to]
        if moves:
            self._runner.slots.plan(moves)
        conversation.cached += len(slots)

    def verify(self, work: Sequence[tuple[Conversation, Sequence[PassNode]]]) -> list[Choose]:
        conversation, nodes = only_one(work, TorchConversation)
        self.finish()  # one that nobody waited for still reads the buffers that this one fills
        self._attach(conversation)
        self._stop_if_asked()
        try:
            return [self._pass(conversation, nodes)]
        except RuntimeError as error:
            if not torch_model.is_out_of_memory(error):
                raise
            raise torch_model.out_of_memory("a pass failed", error) from error

    def _pass(self, conversation: TorchConversation, nodes: Sequence[PassNode]) -> Choose:
        pending = len(conversation.tokens) - conversation.cached
        if pending == 1:
            tokens, parents = [n.token for n in nodes], [n.parent + 1 for n in nodes]
            rows = Rows(conversation.cached, [conversation.tokens[-1], *tokens], [ROOT, *parents])
            choices = self._choices(conversation, rows)
            conversation.cached, conversation.nodes, conversation.asked = len(conversation.tokens), nodes, []
            return lambda i: choices(conversation.note(i) + 1)
        return self._read_then(conversation, nodes)

    def _read_then(self, conversation: TorchConversation, nodes: Sequence[PassNode]) -> Choose:
        """Read the prompt; a pass over the guesses only if one was right."""
        start, tokens = conversation.cached, conversation.tokens[conversation.cached :]
        logits = self._runner.read(tokens, start)
        root = self._chooser.choose(logits, conversation.voice, [len(conversation.tokens)], lambda i: [], stays=False)
        conversation.cached = len(conversation.tokens)
        below: list[Callable[[int], Choice]] = []

        def choose(i: int) -> Choice:
            if i == ROOT:
                return root(0)
            if not below:
                rows = Rows(conversation.cached, [n.token for n in nodes], [n.parent for n in nodes])
                below.append(self._choices(conversation, rows))
                conversation.nodes, conversation.asked = nodes, []
            return below[0](conversation.note(i))

        return choose

    def _choices(self, conversation: TorchConversation, rows: Rows) -> Callable[[int], Choice]:
        """A pass over rows: the target's token after each."""
        logits = self._runner.decode(rows)
        committed = len(conversation.tokens)
        positions = [rows.first + depth + 1 for depth in rows.depths]
        return self._chooser.choose(
            logits,
            conversation.voice,
            positions,
            lambda i: [rows.tokens[row] for row in rows.path(i) if rows.first + row >= committed],
        )

    def prepare(self, everything: bool, progress: Progress) -> None:
        """Check the model with a few tokens; `everything`: also make ready for all sizes of a pass."""
        self._check_itself()
        if everything:
            self._runner.prepare(progress)

    def _check_itself(self) -> None:
        """A tree must give what plain text gives. A model of an unknown kind for which that fails is not served."""
        first, text = 2, [token % self.vocabulary.size for token in (5, 6, 7, 8, 9)]
        self._runner.read(text[:first], 0)
        tree = self._runner.decode(Rows(first, [text[2], text[0], text[3]], [ROOT, 0, 0]))[2].clone()
        plain = self._runner.read(text[:4], 0)[0]
        apart = float((tree - plain).abs().max() / plain.abs().max())
        if not apart < TOLERANCE[self._runner.model.dtype]:
            raise ModelUnreadable("cannot serve this model", f"its logits in a tree are {apart:.1%} off those in plain text")

    def done(self) -> bool:
        return self._chooser.done()

    def finish(self) -> None:
        self._chooser.finish()

    def abort(self) -> None:
        self._stopped = True

    def close(self) -> None:
        self._owner = None
        self._chooser.close()
        self._runner.close()
        torch_model.SERVED.discard(self._runner)
        torch_model.forget_everything()

"""transformers' own `generate` as a peer: eager, with a static cache and compiled, assisted by the draft, with prompt lookup.

Where our target is a torch model, the peer's is a plain transformers model on the same memory: our backend may have joined and
replaced its layers, so a second set of modules refers to the same weights.
"""

from __future__ import annotations

import copy
import io
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import redirect_stderr
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from duodecoding.backends.trim import Trim, read_trim
from duodecoding.bench.peers import Contender, Ground, Said
from duodecoding.errors import BackendMissing
from duodecoding.types import SamplingParams

LOOKUP_TOKENS = 10  # transformers' own advice for prompt lookup


def create(kind: str, ground: Ground) -> Contender:
    name = "transformers" if kind == "eager" else f"transformers-{kind}"
    for package in ("torch", "transformers", *(["gguf"] if _needs_gguf(kind, ground) else [])):
        if find_spec(package) is None:
            raise BackendMissing(f"{name} is left out", f"{package} is not installed")
    if kind == "assisted" and ground.draft_file is None:
        raise BackendMissing(f"{name} is left out", "there is no draft model")
    from transformers.utils import logging

    logging.set_verbosity_error()
    if "model" not in ground.loaded:
        ground.loaded["model"] = _model(ground)
    model = ground.loaded["model"]
    options: dict[str, Any] = {}
    if kind == "compiled":
        if model.device.type == "cpu":
            raise BackendMissing(f"{name} is left out", "transformers compiles on a GPU only")
        options["cache_implementation"] = "static"
    elif kind == "assisted" and ground.draft_file is not None:
        options["assistant_model"] = read_gguf(ground.draft_file, model.device, model.dtype)
    elif kind == "lookup":
        options["prompt_lookup_num_tokens"] = LOOKUP_TOKENS
    peer = TransformersPeer(name, model, sorted(ground.target.vocabulary.end_tokens), ground.per_task, options)
    if kind == "compiled":
        peer.warm(ground.target.context)
    return peer


def _needs_gguf(kind: str, ground: Ground) -> bool:
    return kind == "assisted" or (not hasattr(ground.target, "_runner") and ground.target_file.suffix == ".gguf")


def _model(ground: Ground) -> Any:
    runner = getattr(ground.target, "_runner", None)  # of the torch backend
    if runner is not None:
        return twin(runner.model)
    from duodecoding.backends import torch_model

    device = torch_model.choose_device(ground.config.device)
    dtype = torch_model.choose_dtype(ground.config.dtype, device)
    if ground.target_file.is_file():
        return read_gguf(ground.target_file, device, dtype)
    from transformers import AutoModelForCausalLM

    return _ready(AutoModelForCausalLM.from_pretrained(str(ground.target_file), dtype=dtype, local_files_only=True).to(device))


def read_gguf(path: Path, device: Any, dtype: Any) -> Any:
    """Refused if transformers would fill in weights that it does not find. Those that we join ourselves are handed to it, and so
    is a vocabulary that we trimmed."""
    import gguf
    from transformers import AutoModelForCausalLM

    with redirect_stderr(io.StringIO()):  # a progress bar that cannot be turned off
        model, loaded = AutoModelForCausalLM.from_pretrained(
            str(path.parent), gguf_file=path.name, dtype=dtype, local_files_only=True, output_loading_info=True
        )
    reader = gguf.GGUFReader(path)
    tensors, fields = {tensor.name: tensor for tensor in reader.tensors}, reader.fields
    found = {name: rows for layer in range(model.config.num_hidden_layers) for name, rows in _parted(tensors, layer, model.config)}
    lacking = set(loaded["missing_keys"]) - set(found)
    if lacking:
        raise BackendMissing(f"transformers cannot read {path.name}", f"it does not find {min(lacking)}")
    model.load_state_dict(found, strict=False)
    trim = read_trim(lambda name: fields[name].contents() if name in fields else "", model.config.vocab_size, path.name)
    return _ready((model if trim is None else untrimmed(model, trim)).to(device))


def _parted(tensors: Mapping[str, Any], layer: int, config: Any) -> Iterator[tuple[str, Any]]:
    """Queries, keys and values that a file of ours has as one tensor, rotary pairs side by side."""
    import gguf
    import torch

    joint = tensors.get(f"blk.{layer}.attn_qkv.weight")
    if joint is None:
        return
    rows = torch.from_numpy(gguf.quants.dequantize(joint.data, joint.tensor_type).copy())
    size, heads, shared = config.head_dim, config.num_attention_heads, config.num_key_value_heads
    for part, of_part in zip("qkv", rows.split([heads * size, shared * size, shared * size]), strict=True):
        halves = of_part if part == "v" else of_part.view(-1, size // 2, 2, rows.shape[1]).transpose(1, 2).reshape(of_part.shape)
        yield f"model.layers.{layer}.self_attn.{part}_proj.weight", halves


def untrimmed(draft: Any, trim: Trim) -> Any:
    """A draft with some of the target's tokens, as one with all of them: `generate` takes no other. It never says the rest."""
    import torch
    from torch import nn

    class Head(nn.Module):  # type: ignore[misc]
        def __init__(self, inner: Any) -> None:
            super().__init__()
            self.inner = inner
            self.register_buffer("ids", torch.from_numpy(trim.token_ids), persistent=False)  # goes where the model goes

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            said = self.inner(x)
            whole = said.new_full((*said.shape[:-1], len(trim.stand_ins)), -torch.inf)
            whole[..., self.ids] = said
            return whole

    embeddings = draft.get_input_embeddings().weight
    draft.config.tie_word_embeddings = False
    draft.set_output_embeddings(Head(draft.get_output_embeddings()))
    draft.set_input_embeddings(nn.Embedding.from_pretrained(embeddings[torch.from_numpy(trim.stand_ins)]))
    draft.config.vocab_size = len(trim.stand_ins)
    return draft


def _ready(model: Any) -> Any:
    return model.eval().requires_grad_(False)


def twin(model: Any) -> Any:
    """A transformers model as it comes, on the weights of one that our backend may have changed."""
    import torch

    from duodecoding.backends.torch_fast import Part, RowLinear

    config = copy.deepcopy(model.config)
    config._attn_implementation = "sdpa"
    with torch.device("meta"):
        plain = type(model)(config)
    weights = {name: tensor for name, tensor in model.state_dict().items() if ".joint." not in name}
    for name, module in model.named_modules():
        joint, rows = (module.joint, slice(module.start, module.end)) if isinstance(module, Part) else (module, slice(None))
        if isinstance(joint, RowLinear) and not name.endswith(".joint"):
            weights[f"{name}.weight"] = joint.weight[rows]
            if joint.bias is not None:
                weights[f"{name}.bias"] = joint.bias[rows]
    plain.load_state_dict(weights, assign=True)
    plain.tie_weights()
    for name, buffer in model.named_buffers():  # such as rotary frequencies, which no file holds
        place, _, leaf = name.rpartition(".")
        plain.get_submodule(place)._buffers[leaf] = buffer
    return _ready(plain)


class _Clock:
    """A streamer that notes when the first token came, and how many came with it. The prompt comes before."""

    def __init__(self) -> None:
        self.calls, self.first, self.came_with_first = 0, 0.0, 1

    def put(self, value: Any) -> None:
        self.calls += 1
        if self.calls == 2:
            self.first, self.came_with_first = time.perf_counter(), int(value.numel())

    def end(self) -> None:
        pass


class TransformersPeer:
    def __init__(self, name: str, model: Any, end_tokens: list[int], per_task: int, options: dict[str, Any]) -> None:
        self.name, self.per_task = name, per_task
        self._model, self._end_tokens, self._options = model, end_tokens, options

    def warm(self, context: int) -> None:
        """Once at full length: a static cache that grows later is compiled for again."""
        self.answer([0] * (context - 8), SamplingParams(max_tokens=4))

    def answer(self, prompt: Sequence[int], params: SamplingParams) -> Said:
        import torch

        sampling: dict[str, Any] = {"do_sample": False}
        if not params.greedy:
            sampling = {"do_sample": True, "temperature": params.temperature, "top_p": params.top_p, "top_k": params.top_k}
            torch.manual_seed(params.seed)
        clock, start = _Clock(), time.perf_counter()
        ids = torch.tensor([list(prompt)], device=self._model.device)
        out = self._model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=params.max_tokens,
            eos_token_id=self._end_tokens or None,
            pad_token_id=self._end_tokens[0] if self._end_tokens else 0,
            streamer=clock,
            **sampling,
            **self._options,
        )
        tokens = out[0, len(prompt) :].tolist()
        seconds = time.perf_counter() - start
        end = next((i for i, token in enumerate(tokens) if token in self._end_tokens), None)
        return {
            "tokens": tokens if end is None else tokens[: end + 1],
            "finish": "length" if end is None else "stop",
            "seconds": seconds,
            "ttft_seconds": clock.first - start,
            "first_tokens": clock.came_with_first,
        }

    def abort(self) -> None:
        """`generate` has no way to; the answer ends by itself."""

    def close(self) -> None:
        self._model, self._options = None, {}

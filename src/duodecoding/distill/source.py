"""The target as a teacher: its tensors, its tokenizer and its chat template, from a GGUF file or a transformers directory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from duodecoding.distill.export import Field, Shape, Weights, read_gguf, texts_of
from duodecoding.errors import DuoError, ModelUnreadable
from duodecoding.text import render_chat

ENDS = ("<|endoftext|>", "<|im_end|>", "<|eot_id|>", "<|end_of_text|>", "<|end|>", "<end_of_turn>", "</s>")
NORMAL, CONTROL, BYTE = 1, 3, 6  # llama.cpp's types of tokens


@dataclass(frozen=True)
class Source:
    name: str
    shape: Shape
    weights: Weights
    fields: list[Field]
    tokenizer: Any

    def field(self, name: str, otherwise: Any = None) -> Any:
        return next((value for field, value, _ in self.fields if field == name), otherwise)

    @property
    def texts(self) -> list[str]:
        return texts_of(self.fields)

    @property
    def end_tokens(self) -> frozenset[int]:
        named = {self.field(f"tokenizer.ggml.{kind}_token_id") for kind in ("eos", "eot")} - {None}
        return frozenset(named | {token for token, text in enumerate(self.texts) if text in ENDS})

    @property
    def always_kept(self) -> np.ndarray:
        """Tokens that a trimmed vocabulary must have: control tokens and single bytes."""
        types = self.field("tokenizer.ggml.token_type", [NORMAL] * len(self.texts))
        return np.array([i for i, text in enumerate(self.texts) if types[i] != NORMAL or len(text) == 1], np.int64)

    def encode(self, conversations: Sequence[Sequence[Mapping[str, str]]]) -> list[np.ndarray]:
        """Prompts as the target would be given them: through its chat template."""
        template = self.field("tokenizer.chat_template")
        bos, eos = (self._text(f"tokenizer.ggml.{kind}_token_id") for kind in ("bos", "eos"))
        texts = [render_chat(template, list(c), bos=bos, eos=eos, model=self.name) for c in conversations]
        return [np.array(ids, np.int32) for ids in self.tokenizer(texts, add_special_tokens=False).input_ids]

    def decode(self, ids: np.ndarray) -> str:
        return str(self.tokenizer.decode(ids.tolist(), skip_special_tokens=True))

    def _text(self, name: str) -> str:
        token = self.field(name)
        return "" if token is None else self.texts[token]


def load(path: Path) -> Source:
    try:
        if path.is_dir():
            return _from_directory(path)
        shape, weights, fields = read_gguf(path)
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name, local_files_only=True)
        return Source(path.stem, shape, weights, fields, tokenizer)
    except DuoError:
        raise
    except Exception as error:  # transformers raises whatever it meets in somebody's files
        said = str(error).strip().partition("\n")[0] or type(error).__name__
        raise ModelUnreadable(f"cannot read {path}", said, "Get the files again or choose another target.") from error


def _from_directory(path: Path) -> Source:
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    config = AutoConfig.from_pretrained(str(path), local_files_only=True)
    rope: dict[str, Any] = getattr(config, "rope_parameters", None) or {}
    if config.model_type != "llama" or rope.get("rope_type", "default") != "default" or getattr(config, "attention_bias", False):
        raise ModelUnreadable(f"cannot make a draft of {path}", f"it is no plain Llama but {config.model_type}")
    model = AutoModelForCausalLM.from_pretrained(str(path), local_files_only=True, dtype="float32")
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    shape = Shape(
        layers=config.num_hidden_layers,
        width=config.hidden_size,
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        head_dim=head_dim,
        neurons=config.intermediate_size,
        vocab=config.vocab_size,
        context=config.max_position_embeddings,
        rope_base=float(rope.get("rope_theta", getattr(config, "rope_theta", 10000.0))),
        eps=config.rms_norm_eps,
    )
    tokenizer = AutoTokenizer.from_pretrained(str(path), local_files_only=True)
    return Source(path.name, shape, _renamed(model, shape), _tokenizer_fields(path, tokenizer), tokenizer)


def _renamed(model: Any, shape: Shape) -> Weights:
    """Tensors of transformers under GGUF's names, rotary pairs side by side instead of half a head apart."""
    state = {name: tensor.numpy() for name, tensor in model.state_dict().items()}

    def pairs(rows: np.ndarray) -> np.ndarray:
        half = rows.reshape(-1, 2, shape.head_dim // 2, shape.width)
        return half.swapaxes(1, 2).reshape(rows.shape)

    found = {"token_embd.weight": state["model.embed_tokens.weight"], "output_norm.weight": state["model.norm.weight"]}
    if not model.config.tie_word_embeddings:
        found["output.weight"] = state["lm_head.weight"]
    for layer in range(shape.layers):
        at, to = f"model.layers.{layer}.", f"blk.{layer}."
        q, k, v = (state[f"{at}self_attn.{part}_proj.weight"] for part in "qkv")
        found[f"{to}attn_qkv.weight"] = np.concatenate([pairs(q), pairs(k), v])
        found[f"{to}attn_output.weight"] = state[f"{at}self_attn.o_proj.weight"]
        for ours, theirs in (("attn_norm", "input_layernorm"), ("ffn_norm", "post_attention_layernorm")):
            found[f"{to}{ours}.weight"] = state[f"{at}{theirs}.weight"]
        for part in ("gate", "up", "down"):
            found[f"{to}ffn_{part}.weight"] = state[f"{at}mlp.{part}_proj.weight"]
    return found


def _tokenizer_fields(path: Path, tokenizer: Any) -> list[Field]:
    """Enough of a tokenizer for llama.cpp to load the draft. A draft is given ids, so it need not cut text well."""
    from gguf import GGUFValueType as Kind

    from duodecoding.backends.torch_text import TransformersVocabulary

    vocabulary = TransformersVocabulary(path)
    special = set(tokenizer.all_special_ids)
    texts = vocabulary.texts()
    found: list[Field] = [
        ("tokenizer.ggml.model", "gpt2", [Kind.STRING]),
        ("tokenizer.ggml.pre", "default", [Kind.STRING]),
        ("tokenizer.ggml.tokens", texts, [Kind.ARRAY, Kind.STRING]),
        ("tokenizer.ggml.token_type", [CONTROL if i in special else NORMAL for i in range(len(texts))], [Kind.ARRAY, Kind.INT32]),
        ("tokenizer.ggml.merges", [], [Kind.ARRAY, Kind.STRING]),
        ("tokenizer.ggml.eos_token_id", min(vocabulary.end_tokens, default=0), [Kind.UINT32]),
    ]
    if tokenizer.bos_token_id is not None:
        found.append(("tokenizer.ggml.bos_token_id", tokenizer.bos_token_id, [Kind.UINT32]))
    if vocabulary.chat_template:
        found.append(("tokenizer.chat_template", vocabulary.chat_template, [Kind.STRING]))
    return found

"""The vocabulary of a transformers model, from its tokenizer."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

from duodecoding.errors import ModelUnreadable

SPACE = "▁"  # a space in a SentencePiece vocabulary


class TransformersVocabulary:
    """`size` is the number of logits, which may be padded beyond the tokenizer's own tokens."""

    def __init__(self, path: Path) -> None:
        self._tokenizer = _load_tokenizer(path)
        settings = _settings(path)
        self.size = int(settings.get("vocab_size") or len(self._tokenizer))
        self.end_tokens = _end_tokens(path, settings, self._tokenizer)
        self.chat_template = _template(self._tokenizer)
        self.bos_text = self._tokenizer.bos_token or ""
        self.eos_text = self._tokenizer.eos_token or ""
        self._adds_bos = bool(self.bos_text) and self._tokenizer("a").input_ids[:1] == [self._tokenizer.bos_token_id]
        self._special = frozenset(self._tokenizer.all_special_ids)
        self._added = {id: str(token.content) for id, token in self._tokenizer.added_tokens_decoder.items()}
        self._special |= {id for id, token in self._tokenizer.added_tokens_decoder.items() if token.special}
        self._byte_level = "ByteLevel" in json.dumps(json.loads(self._tokenizer.backend_tokenizer.to_str()).get("decoder"))
        self._pieces: dict[int, bytes] = {}

    def tokenize(self, text: str, *, special: bool, bos: bool) -> list[int]:
        ids = list(self._tokenizer(text, add_special_tokens=False, split_special_tokens=not special).input_ids)
        return [self._tokenizer.bos_token_id, *ids] if bos and self._adds_bos else ids

    def piece(self, token: int) -> bytes:
        known = self._pieces.get(token)
        if known is None:
            known = self._pieces[token] = self._bytes(token)
        return known

    def _bytes(self, token: int) -> bytes:
        if token in self._special or token >= len(self._tokenizer):
            return b""
        if token in self._added:
            return self._added[token].encode()
        text = self._tokenizer.convert_ids_to_tokens(token)
        if self._byte_level:
            table = _byte_of_character()
            return b"".join(bytes([table[c]]) if c in table else c.encode() for c in text)
        if len(text) == 6 and text.startswith("<0x") and text.endswith(">"):
            return bytes([int(text[3:5], 16)])
        return bytes(text.replace(SPACE, " ").encode())

    def texts(self) -> list[str]:
        known = self._tokenizer.convert_ids_to_tokens(list(range(min(self.size, len(self._tokenizer)))))
        padding = range(len(known), self.size)
        return [str(text) if text is not None else f"[PAD{id}]" for id, text in enumerate(known)] + [f"[PAD{id}]" for id in padding]


@cache
def _byte_of_character() -> dict[str, int]:
    """Byte-level BPE writes every byte as a printable character: those that are one stay, the others follow from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(byte): byte for byte in printable}
    others = (byte for byte in range(256) if chr(byte) not in table)
    return table | {chr(0x100 + i): byte for i, byte in enumerate(list(others))}


def _load_tokenizer(path: Path) -> Any:
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(str(path), local_files_only=True)
    except Exception as error:  # whatever a tokenizer's files make the library raise
        said = str(error).strip().partition("\n")[0]
        raise ModelUnreadable(f"cannot read the tokenizer of {path}", said, "Get tokenizer.json and its companions too.") from error
    if not tokenizer.is_fast:
        raise ModelUnreadable(f"cannot read the tokenizer of {path}", "it has no tokenizer.json")
    return tokenizer


def _settings(path: Path) -> dict[str, Any]:
    file = path / "config.json"
    settings = json.loads(file.read_text()) if file.is_file() else {}
    return settings.get("text_config") or settings


def _end_tokens(path: Path, settings: dict[str, Any], tokenizer: Any) -> frozenset[int]:
    file = path / "generation_config.json"
    generation = json.loads(file.read_text()) if file.is_file() else {}
    found: set[int] = set()
    for value in (generation.get("eos_token_id"), settings.get("eos_token_id"), tokenizer.eos_token_id):
        found.update(value if isinstance(value, list) else [value] if value is not None else [])
    return frozenset(found)


def _template(tokenizer: Any) -> str | None:
    template = tokenizer.chat_template
    if isinstance(template, dict):
        template = template.get("default")
    return str(template) if template else None

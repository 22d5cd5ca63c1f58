"""llama.cpp through llama-cpp-python's low-level API, which no other module touches.

Exactness means that a token's logits do not depend on what else is in its pass. On a CPU, and checked by tests:
flash attention walks the cells of the KV cache in order and skips masked ones, so the committed tokens must lie in the cache in
their own order; it changes its algorithm with the shape of the batch when K and V have the same float type, and K in BF16 beside V
in F16 keeps it on one. Matrices have kernels that differ in rounding: tiles for 8 tokens or more (K-quants) and repacked weights
for groups of 4 are turned off; the one for a single token (float weights, IQ4) is avoided by a second token in the pass.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import llama_cpp as C
import numpy as np
import numpy.typing as npt

from duodecoding.backends.trim import Trim, read_trim
from duodecoding.errors import BackendFailure, Interrupted, ModelUnreadable
from duodecoding.sampling import Row

BATCH = 512  # tokens per llama_decode at most
TREE_ROOM = 256  # cells beyond the context, for guesses
MAX_SEQUENCES = 128  # paths that one tree can have; llama.cpp allows 256
TYPE_F16, TYPE_BF16 = 1, 30
ABORTED = 2  # llama_decode's return value
LOG_ERROR = 4

_log_tail: list[str] = []
# As a number, not as an object that points there.
_address_of_logits = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)(ctypes.cast(C.llama_get_logits, ctypes.c_void_p).value or 0)


@C.llama_log_callback  # type: ignore[untyped-decorator]
def _keep_errors(level: int, text: bytes, _user: object) -> None:
    if level >= LOG_ERROR:
        _log_tail.append(text.decode("utf-8", "replace").strip())
        del _log_tail[:-8]


def _start() -> None:
    os.environ.setdefault("GGML_CPU_TILED_MM", "0")  # see above; llama.cpp reads it once, at its first multiplication
    C.llama_log_set(_keep_errors, ctypes.c_void_p(0))
    C.llama_backend_init()


def _last_error(otherwise: str) -> str:
    lines = [line.split(": ", 1)[-1] for line in _log_tail if line and "failed to load model" not in line]
    return lines[0] if lines else otherwise


def supports_gpu() -> bool:
    return bool(C.llama_supports_gpu_offload())


def may_repack() -> bool:
    """Repacked weights go to AMX where llama.cpp was compiled with it, and that crashes: GCC 12's intrinsics declare 8 bytes read
    of the 64 that set up the tiles, so the compiler leaves out the stores of the others (ggml-org/llama.cpp issue 20824)."""
    return b"AMX_INT8 = 1" not in C.llama_print_system_info()


def physical_cores() -> int:
    """Cores this process may use, hyper-threads counted once."""
    allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))
    siblings = set()
    for cpu in allowed:
        path = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
        siblings.add(path.read_text().strip() if path.exists() else str(cpu))
    return max(1, len(siblings))


class LlamaVocabulary:
    """`trim`: the file has some tokens of a larger vocabulary, whose ids are those that everybody else uses."""

    def __init__(self, model: Any, trim: Trim | None = None) -> None:
        self._vocab = C.llama_model_get_vocab(model)
        self.rows = int(C.llama_vocab_n_tokens(self._vocab))  # of the embeddings; as many logits
        self.size = self.rows if trim is None else len(trim.stand_ins)
        self.trimmed_from = "" if trim is None else trim.vocabulary
        self._ids = range(self.rows) if trim is None else trim.token_ids.tolist()
        self._own = {} if trim is None else {id: own for own, id in enumerate(self._ids)}
        self.end_tokens = frozenset(self._ids[t] for t in range(self.rows) if C.llama_vocab_is_eog(self._vocab, t))
        template = C.llama_model_chat_template(model, None)
        self.chat_template = template.decode("utf-8", "replace") if template else None
        self.bos_text = self._text(C.llama_vocab_bos(self._vocab))
        self.eos_text = self._text(C.llama_vocab_eos(self._vocab))
        self._pieces: dict[int, bytes] = {}

    def _text(self, row: int) -> str:
        return C.llama_vocab_get_text(self._vocab, row).decode("utf-8", "replace") if 0 <= row < self.rows else ""

    def _row(self, token: int) -> int:
        return self._own.get(token, -1) if self._own else token

    def texts(self) -> list[str]:
        return [self._text(self._row(token)) for token in range(self.size)]

    def tokenize(self, text: str, *, special: bool, bos: bool) -> list[int]:
        data = text.encode("utf-8")
        room = len(data) + 8
        out = (C.llama_token * room)()
        count = C.llama_tokenize(self._vocab, data, len(data), out, room, bos, special)
        if count < 0:
            out = (C.llama_token * -count)()
            count = C.llama_tokenize(self._vocab, data, len(data), out, -count, bos, special)
        return [self._ids[row] for row in out[:count]] if self._own else list(out[:count])

    def piece(self, token: int) -> bytes:
        known = self._pieces.get(token)
        if known is None:
            row, buffer = self._row(token), ctypes.create_string_buffer(64)
            size = C.llama_token_to_piece(self._vocab, row, buffer, 64, 0, False) if row >= 0 else 0
            if size < 0:
                buffer = ctypes.create_string_buffer(-size)
                size = C.llama_token_to_piece(self._vocab, row, buffer, -size, 0, False)
            known = self._pieces[token] = buffer.raw[: max(0, size)]
        return known


class LlamaModel:
    """A GGUF file in memory. `vocabulary_only` reads everything but the weights. `repack`: faster on some CPUs, not exact."""

    def __init__(self, path: Path, *, gpu_layers: int = 0, vocabulary_only: bool = False, repack: bool = False) -> None:
        _start()
        _log_tail.clear()
        params = C.llama_model_default_params()
        params.n_gpu_layers = 10_000 if gpu_layers < 0 else gpu_layers
        params.vocab_only = vocabulary_only
        params.use_extra_bufts = repack and may_repack()
        self.path, self.gpu_layers = path, gpu_layers
        self.handle = C.llama_model_load_from_file(os.fsencode(path), params)
        if not self.handle:
            raise ModelUnreadable(
                f"cannot load {path}", _last_error("llama.cpp gave no reason"), "Get the file again or choose another."
            )
        rows = int(C.llama_vocab_n_tokens(C.llama_model_get_vocab(self.handle)))
        self.trim = read_trim(self._value, rows, path.name)
        self.vocabulary = LlamaVocabulary(self.handle, self.trim)
        self.trained_context = int(C.llama_model_n_ctx_train(self.handle))
        self.weights_bytes = int(C.llama_model_size(self.handle))  # an input embedding of its own is counted in
        file_type = self._value("general.file_type")
        self.file_type = int(file_type) if file_type.isdigit() else -1

    def _value(self, key: str) -> str:
        """Of the file's metadata; empty where it has none."""
        size = C.llama_model_meta_val_str(self.handle, key.encode(), None, 0)
        buffer = ctypes.create_string_buffer(max(0, size) + 1)
        C.llama_model_meta_val_str(self.handle, key.encode(), buffer, len(buffer))
        return buffer.value.decode("utf-8", "replace")

    def check_can_roll_back(self) -> None:
        if (
            C.llama_model_is_recurrent(self.handle)
            or C.llama_model_is_hybrid(self.handle)
            or C.llama_model_has_encoder(self.handle)
        ):
            raise ModelUnreadable(
                f"cannot serve {self.path.name}", "its state cannot be rolled back to an earlier token, which guessing needs"
            )

    def close(self) -> None:
        if self.handle:
            C.llama_model_free(self.handle)
            self.handle = None


def read_vocabulary(path: Path) -> LlamaVocabulary:
    """Of a model without its weights. It lets go of the file's tables when it goes."""
    model = LlamaModel(path, vocabulary_only=True)
    weakref.finalize(model.vocabulary, C.llama_model_free, model.handle)
    return model.vocabulary


class Context:
    """A llama_context with one unified KV cache, and a batch whose arrays numpy can fill."""

    def __init__(self, model: LlamaModel, context: int, threads: int, *, exact: bool, sequences: int = MAX_SEQUENCES) -> None:
        params = C.llama_context_default_params()
        params.n_ctx = context + TREE_ROOM
        params.n_batch = params.n_ubatch = BATCH
        params.n_seq_max = sequences
        params.kv_unified = True
        params.n_threads = params.n_threads_batch = threads or physical_cores()
        params.flash_attn_type = C.LLAMA_FLASH_ATTN_TYPE_ENABLED
        params.no_perf = True
        if exact and model.gpu_layers == 0:
            params.type_k, params.type_v = TYPE_BF16, TYPE_F16
        self.handle = C.llama_init_from_model(model.handle, params)
        if not self.handle:
            raise BackendFailure(
                f"cannot make a context of {context} tokens for {model.path.name}",
                _last_error("out of memory?"),
                "Lower --ctx-size.",
            )
        self.memory = C.llama_get_memory(self.handle)
        self.vocab_size = model.vocabulary.rows
        self._reads = model.trim.stand_ins.tolist() if model.trim is not None else None
        self._views: dict[tuple[int, int], tuple[Row, list[Row]]] = {}  # of the logits, by their address and the number of outputs
        self._stop: ctypes.Array[ctypes.c_char] = ctypes.create_string_buffer(2)
        self._set_abort_callback()
        self._make_batch()

    def stop_on(self, flag: mmap.mmap) -> None:
        """Let another process stop a pass."""
        self._stop = (ctypes.c_char * 2).from_buffer(flag)
        self._set_abort_callback()

    def _set_abort_callback(self) -> None:
        # llama.cpp asks after every operation of the graph. A Python callback would take the interpreter's lock a thousand
        # times a pass; strlen needs no Python and is false while the string is empty.
        strlen = ctypes.cast(ctypes.CDLL(None).strlen, ctypes.c_void_p).value or 0
        self._callback = C.ggml_abort_callback(strlen)
        C.llama_set_abort_callback(self.handle, self._callback, ctypes.cast(self._stop, ctypes.c_void_p))

    def _make_batch(self) -> None:
        self._tokens = np.zeros(BATCH, np.int32)
        self._positions = np.zeros(BATCH, np.int32)
        self._counts = np.zeros(BATCH, np.int32)
        self._sequences = np.zeros((BATCH, MAX_SEQUENCES), np.int32)
        self._outputs = np.zeros(BATCH, np.int8)
        pointer = ctypes.POINTER(ctypes.c_int32)
        rows = [self._sequences[i : i + 1].ctypes.data_as(pointer) for i in range(BATCH)]
        self._rows = (pointer * BATCH)(*rows)
        self._batch = C.llama_batch(
            n_tokens=0,
            token=self._tokens.ctypes.data_as(pointer),
            embd=None,
            pos=self._positions.ctypes.data_as(pointer),
            n_seq_id=self._counts.ctypes.data_as(pointer),
            seq_id=self._rows,
            logits=self._outputs.ctypes.data_as(ctypes.POINTER(ctypes.c_int8)),
        )

    def decode(self, tokens: Sequence[int], positions: Sequence[int], sequences: Sequence[Sequence[int]], outputs: int) -> None:
        """One pass. Logits are kept for the last `outputs` tokens."""
        for i, ids in enumerate(sequences):
            self._counts[i] = len(ids)
            self._sequences[i, : len(ids)] = ids
        self._decode(tokens, positions, outputs)

    def decode_apart(self, tokens: Sequence[int], positions: Sequence[int], sequences: Sequence[int], outputs: int) -> None:
        """The same where each token is in one sequence only."""
        n = len(tokens)
        self._counts[:n] = 1
        self._sequences[:n, 0] = sequences
        self._decode(tokens, positions, outputs)

    def _decode(self, tokens: Sequence[int], positions: Sequence[int], outputs: int) -> None:
        n, reads = len(tokens), self._reads
        self._tokens[:n] = tokens if reads is None else [reads[token] for token in tokens]
        self._positions[:n] = positions
        self._outputs[: n - outputs] = 0
        self._outputs[n - outputs : n] = 1
        self._batch.n_tokens = n
        self._n_outputs = outputs
        code = C.llama_decode(self.handle, self._batch)
        if code == ABORTED:
            self.clear_abort()
            raise Interrupted("the pass was stopped")
        if code != 0:
            raise BackendFailure(f"llama.cpp could not decode {n} tokens", _last_error(f"code {code}"))

    def logits(self) -> Row:
        """The kept logits, (outputs, vocab). A view: the next pass overwrites it."""
        return self._view()[0]

    def rows(self) -> list[Row]:
        """The same by output. To make a view takes as long as to use it, so the list is kept: leave it as it is."""
        return self._view()[1]

    def _view(self) -> tuple[Row, list[Row]]:
        count = self._n_outputs
        address = _address_of_logits(self.handle)
        view = self._views.get((address, count))
        if view is None:  # llama.cpp moves its buffer only to enlarge it
            flat = (ctypes.c_float * (count * self.vocab_size)).from_address(address)
            rows: Row = np.ctypeslib.as_array(flat).reshape(count, self.vocab_size)
            view = self._views[address, count] = rows, list(rows)
        return view

    def abort(self) -> None:
        self._stop[0] = b"\1"

    def clear_abort(self) -> None:
        self._stop[0] = b"\0"

    def copy(self, source: int, to: int, end: int, start: int = -1) -> None:
        C.llama_memory_seq_cp(self.memory, source, to, start, end)

    def cut(self, sequence: int, start: int) -> None:
        """-1: every sequence, every position."""
        C.llama_memory_seq_rm(self.memory, sequence, start, -1)

    def keep_only(self, sequence: int) -> None:
        C.llama_memory_seq_keep(self.memory, sequence)

    def save(self) -> npt.NDArray[np.uint8]:
        """A copy of sequence 0."""
        state = np.empty(C.llama_state_seq_get_size(self.handle, 0), np.uint8)
        C.llama_state_seq_get_data(self.handle, state.ctypes.data_as(ctypes.POINTER(ctypes.c_uint8)), state.size, 0)
        return state

    def load(self, state: npt.NDArray[np.uint8]) -> None:
        """Sequence 0 as it was saved, and nothing else. Into an empty cache, where it gets the cells from the first one on."""
        self.cut(-1, -1)
        if not C.llama_state_seq_set_data(self.handle, state.ctypes.data_as(ctypes.POINTER(ctypes.c_uint8)), state.size, 0):
            raise BackendFailure("llama.cpp could not restore a conversation", _last_error("it gave no reason"))

    def close(self) -> None:
        if self.handle:
            C.llama_free(self.handle)
            self.handle = None


def usable_context(trained: int, wanted: int) -> int:
    """`trained`: with so much context; 0: not known."""
    return min(wanted, trained) if trained > 0 else wanted


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    for i, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return i
    return min(len(a), len(b))

"""Loading a transformers model: where, in which type, does it fit, and can it be served exactly. No passes here."""

from __future__ import annotations

import gc
import math
import os
import re
import traceback
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from duodecoding.backends.torch_slots import ATTENTION, CacheShape, attention
from duodecoding.errors import BackendMissing, DuoError, ModelUnreadable, OutOfMemory, UsageError

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
FULL, SLIDING = "full_attention", "sliding_attention"
MOVING_ROPE = {"dynamic", "longrope"}  # their angles depend on how long the text is by now


def choose_device(name: str) -> torch.device:
    cuda = torch.cuda.is_available()
    if name == "auto":
        return torch.device("cuda", 0) if cuda else torch.device("cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise UsageError(f"device is {name!r}", "it must be auto, cpu, cuda or cuda:N") from None
    if device.type not in {"cpu", "cuda"}:
        raise UsageError(f"device is {name!r}", "it must be auto, cpu, cuda or cuda:N")
    if device.type == "cuda" and not cuda:
        why = "torch finds no GPU" if torch.version.cuda else f"this torch ({torch.__version__}) was built without CUDA"
        raise BackendMissing(f"device {name} is not there", why, "Use --device cpu, or install a torch for CUDA.")
    count = torch.cuda.device_count() if device.type == "cuda" else 1
    if (device.index or 0) >= count:
        raise UsageError(f"device is {name!r}", f"there are {count}, numbered from 0")
    return torch.device("cuda", device.index or 0) if device.type == "cuda" else device


def choose_dtype(name: str, device: torch.device) -> torch.dtype:
    """`auto`: float32 on a CPU; on a GPU bfloat16, or float16 where it lacks that."""
    lacks = device.type == "cuda" and not torch.cuda.is_bf16_supported(including_emulation=False)
    if name == "auto":
        return torch.float32 if device.type == "cpu" else torch.float16 if lacks else torch.bfloat16
    if name not in DTYPES:
        raise UsageError(f"dtype is {name!r}", f"it must be auto, {', '.join(DTYPES)}")
    if name == "bfloat16" and lacks:
        model = torch.cuda.get_device_name(device)
        raise UsageError("dtype is bfloat16", f"{model} has no arithmetic for it", "Use --dtype float16 or float32.")
    return DTYPES[name]


def load_model(path: Path, device: torch.device, dtype: torch.dtype, context: int, room: int) -> Any:
    """A causal LM from a directory or a GGUF file, on its device, checked. `room`: slots for guesses, beyond the context."""
    from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM

    AttentionInterface.register(ATTENTION, attention)
    where: dict[str, Any] = {"pretrained_model_name_or_path": str(path), "local_files_only": True}
    if path.is_file():
        where = {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name, "local_files_only": True}
    with _explained(path), _quiet():
        config = AutoConfig.from_pretrained(**where)
        text = config.get_text_config()
        check_config(path.name, text, usable_context(text, context))
        _check_memory(path, text, device, dtype, usable_context(text, context) + room)
        options: dict[str, Any] = {"config": config, "dtype": dtype, "attn_implementation": ATTENTION, "output_loading_info": True}
        if device.type == "cuda":
            options["device_map"] = {"": device}  # straight to the GPU, not through a copy in memory
        model, report = AutoModelForCausalLM.from_pretrained(**where, **options)
    _check_weights(path, report)
    _check_class(path.name, model)
    model.eval().requires_grad_(False)
    return model


def weights_bytes(model: Any) -> int:
    """What a pass reads. Of an embedding that is not the head too, that is next to nothing."""
    inner, outer = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    return sum(p.nbytes for p in model.parameters() if p is not inner or p is outer)


def copy_bandwidth(device: torch.device, size: int = 2**30, repeats: int = 8) -> float:
    """Bytes a second that a large copy on a GPU reads and writes."""
    source = torch.zeros(size, dtype=torch.uint8, device=device).random_(100)
    to = torch.empty_like(source)
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    with torch.cuda.device(device):
        to.copy_(source)
        begin.record()
        for _ in range(repeats):
            to.copy_(source)
        end.record()
        end.synchronize()
        del source, to
        torch.cuda.empty_cache()
    return 2 * size * repeats / (begin.elapsed_time(end) / 1e3)


def usable_context(config: Any, wanted: int) -> int:
    trained = getattr(config, "max_position_embeddings", None)
    return min(wanted, trained) if trained else wanted


@contextmanager
def _explained(path: Path) -> Iterator[None]:
    """Errors of the libraries in our own words."""
    try:
        yield
    except DuoError:
        raise
    except ImportError as error:
        raise BackendMissing(f"cannot load {path}", _first_line(error), "Run: pip install 'duodecoding[torch]'") from error
    except Exception as error:  # transformers raises whatever it meets in somebody's files
        if is_out_of_memory(error):
            raise  # explained by `leaving_nothing`
        raise ModelUnreadable(f"cannot load {path}", _first_line(error), "Get the files again or choose another model.") from error


@contextmanager
def _quiet() -> Iterator[None]:
    """What transformers would print about weights is in our errors."""
    from transformers.utils import logging

    level = logging.get_verbosity()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        logging.enable_progress_bar()


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__


SERVED: weakref.WeakSet[Any] = weakref.WeakSet()  # what holds CUDA graphs; these use the libraries' workspaces


def forget_everything() -> None:
    """Give memory back to the GPU that nothing refers to any more."""
    gc.collect()
    if torch.cuda.is_available():
        if not SERVED:
            torch._C._cuda_clearCublasWorkspaces()  # 32 MB for each stream, else kept to the end of the process
        torch.cuda.empty_cache()


def is_out_of_memory(error: BaseException) -> bool:
    """Also where it is not torch that asks for memory: a graph takes some for itself."""
    return isinstance(error, torch.OutOfMemoryError) or (
        isinstance(error, RuntimeError) and "CUDA error: out of memory" in str(error)
    )


def out_of_memory(what: str, error: BaseException) -> OutOfMemory:
    free, total = torch.cuda.mem_get_info() if torch.cuda.is_available() else (0, 0)
    wanted = re.search(r"Tried to allocate ([\d.]+ \w+)", str(error))
    return OutOfMemory(what, f"it needs {wanted[1]} more" if wanted else _first_line(error), free, total)


@contextmanager
def leaving_nothing(what: str) -> Iterator[None]:
    """If the work fails, what it had put on the GPU goes, although the error lives on. Running out of memory is explained."""
    try:
        yield
    except BaseException as error:
        explained = out_of_memory(what, error) if is_out_of_memory(error) else None  # with what is free now, not afterwards
        for each in (error, error.__cause__):
            traceback.clear_frames(each.__traceback__ if each is not None else None)  # their variables hold models and tensors
        forget_everything()
        if explained is not None:
            raise explained from None
        raise


# What can be served exactly


def check_config(name: str, config: Any, context: int) -> None:
    """Refuse a model whose answer would not depend on tokens and their positions alone, with the reason."""
    if getattr(config, "is_encoder_decoder", False):
        raise _refused(name, "it has an encoder, which reads its text as a whole")
    window = getattr(config, "sliding_window", None)
    if getattr(config, "use_sliding_window", True) is False:
        window = None
    kinds = set(getattr(config, "layer_types", None) or ([SLIDING] if window else [FULL]))
    others = kinds - {FULL, SLIDING}
    if others:
        raise _refused(name, f"it has {' and '.join(sorted(others))} layers, whose state cannot be rolled back to an earlier token")
    if SLIDING in kinds and (window is None or window < context):
        reason = f"its attention slides over the last {window} tokens and the context is {context}"
        raise _refused(name, reason, f"Lower --ctx-size to {window} or less." if window else "")
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    moving = {str(part.get("rope_type")) for part in (rope, *rope.values()) if isinstance(part, dict)} & MOVING_ROPE
    if moving:
        raise _refused(name, f"its positions ({moving.pop()} rope) change as the text grows")


def _check_class(name: str, model: Any) -> None:
    if getattr(model, "_is_stateful", False):
        raise _refused(name, "its state cannot be rolled back to an earlier token")
    if not getattr(model, "_supports_attention_backend", False):
        raise _refused(name, f"{type(model).__name__} has an attention of its own, which knows no trees")


def _refused(name: str, reason: str, fix: str = "") -> ModelUnreadable:
    return ModelUnreadable(f"cannot serve {name}", reason, fix)


def _check_weights(path: Path, report: dict[str, Any]) -> None:
    missing = sorted(report.get("missing_keys") or ())
    surplus = sorted(key for key in report.get("unexpected_keys") or () if "layers." in key)
    other = sorted(str(key) for key in report.get("mismatched_keys") or ())
    for what, keys in (("lack", missing), ("have a surplus of", surplus), ("have another shape for", other)):
        if keys:
            why = f"they {what} {len(keys)} tensor{'s' if len(keys) > 1 else ''}, such as {keys[0]}"
            raise ModelUnreadable(f"the weights of {path} do not match its config", why, "Get all files of one model again.")


def _check_memory(path: Path, config: Any, device: torch.device, dtype: torch.dtype, slots: int) -> None:
    """Before anything is loaded: weights and KV cache against what is free on the GPU."""
    if device.type != "cuda":
        return
    weights = _parameters(path) * dtype.itemsize
    cache = CacheShape.of(config).bytes_per_token(dtype) * slots
    free, total = torch.cuda.mem_get_info(device)
    if weights + cache > free:
        need = f"it needs {weights / 1e9:.1f} GB for its weights and {cache / 1e9:.1f} GB for {slots} tokens of KV cache"
        raise OutOfMemory(f"{path.name} does not fit on {torch.cuda.get_device_name(device)}", need, free, total)


def _parameters(path: Path) -> int:
    """Of all weight files, from their headers."""
    if path.is_file():
        from gguf import GGUFReader

        return sum(int(tensor.n_elements) for tensor in GGUFReader(path).tensors)
    from safetensors import safe_open

    count = 0
    for file in path.glob("*.safetensors"):
        with safe_open(os.fspath(file), framework="pt") as tensors:
            count += sum(math.prod(tensors.get_slice(name).get_shape()) for name in tensors.keys())  # noqa: SIM118 - it is no dict
    return count

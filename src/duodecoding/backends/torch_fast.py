"""Making a loaded transformers model fast on a GPU: joint projections, kernels of our own, compiled layers.

Everything is found by what modules are, not by the model's name: linear layers, RMS norms, decoder layers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from duodecoding.backends.torch_fuse import compile_fused
from duodecoding.backends.torch_slots import Slots

KERNEL_ROWS = 128  # more rows are a prompt, which libraries read faster
HEAD_SIZES = {16, 32, 64, 128, 256}
MOST_GROUPS = 16  # query heads for a key head
TOGETHER = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))  # read the same input, so one product serves them all


class RowLinear(nn.Module):
    """A linear layer whose result for a row does not depend on the others, as long as they are few."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, *, kernels: bool, out: torch.dtype | None = None) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(weight, requires_grad=False), bias
        self.kernels, self.out = kernels, out

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat = x.reshape(-1, x.shape[-1])
        if not self.kernels or flat.shape[0] > KERNEL_ROWS:
            return functional.linear(x, self.weight, self.bias).to(self.out or x.dtype)
        from duodecoding.backends.torch_kernels import linear

        parts = linear(flat, self.weight, self.bias is not None or self.out is not None)
        y = parts[0]
        for part in parts[1:]:  # one after the other: a sum of many would be a kernel of its own, in an order of its own
            y = y + part
        if self.bias is not None:
            y = y + self.bias
        return y.to(self.out or x.dtype).view(*x.shape[:-1], -1)


class Part(nn.Module):
    """One of several projections that are computed together: the first computes, all take their share, the last lets go."""

    def __init__(self, joint: RowLinear, start: int, end: int) -> None:
        super().__init__()
        self.joint, self.start, self.end = joint, start, end

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.start == 0:
            self.joint.result = self.joint(x)
        result: torch.Tensor = self.joint.result
        if self.end == self.joint.weight.shape[0]:
            self.joint.result = None  # of a long prompt it is hundreds of megabytes
        return result[..., self.start : self.end]


class RowNorm(nn.Module):
    def __init__(self, norm: Any) -> None:
        super().__init__()
        self.weight, self.variance_epsilon = norm.weight, float(norm.variance_epsilon)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        from duodecoding.backends.torch_kernels import rms_norm

        out: torch.Tensor = rms_norm(x, self.weight, self.variance_epsilon)
        return out


class Fast:
    """What was changed about a model, and a switch: its layers run compiled only inside `compiled`."""

    def __init__(self, model: Any, slots: Slots, *, compile: bool, kernels: bool) -> None:
        half = model.dtype in {torch.bfloat16, torch.float16}
        kernels = kernels and half
        self.groups = _groups(model, slots) if kernels else 0  # query heads for a key head; 0: our attention is not used
        if self.groups:
            from duodecoding.backends.torch_kernels import move

            slots.move_by(move)
        _join(model, kernels)
        _replace_linears(model, kernels)
        if kernels:
            _replace_norms(model)
        self._layers = [module for module in model.modules() if type(module).__name__ in (model._no_split_modules or ())]
        if compile:
            self._compile(model, slots, kernels=kernels)
        else:
            self._layers = []

    def _compile(self, model: nn.Module, slots: Slots, *, kernels: bool) -> None:
        # One compilation serves all layers: none of them may carry a number of its own.
        torch._dynamo.config.recompile_limit = 512
        torch._dynamo.config.accumulated_recompile_limit = 4096
        options = {"emulate_precision_casts": True}
        if hasattr(torch._inductor.config.triton, "enable_pdl"):
            options["triton.enable_pdl"] = True  # as our kernels do: see `torch_kernels`
        how: dict[str, Any] = {"backend": partial(compile_fused, options=options)} if kernels else {"options": options}
        for layer in self._layers:
            for module in layer.modules():
                if isinstance(getattr(module, "layer_idx", None), int):
                    module.layer_idx = slots.layers[module.layer_idx]
            # Fused kernels differ with the number of rows, so what they round must not depend on what was fused.
            layer.compile(dynamic=False, fullgraph=True, **how)
        for module in model.modules():
            if type(module).__name__.endswith("RotaryEmbedding"):  # many small kernels otherwise
                module.compile(dynamic=False, options=options)
                self._layers.append(module)
        for module in self._layers:
            module.duo_compiled, module._compiled_call_impl = module._compiled_call_impl, None

    @contextmanager
    def compiled(self) -> Iterator[None]:
        for layer in self._layers:
            layer._compiled_call_impl = layer.duo_compiled
        try:
            yield
        finally:
            for layer in self._layers:
                layer._compiled_call_impl = None


def _groups(model: Any, slots: Slots) -> int:
    config, keys = model.config.get_text_config(), slots.layers[0].keys
    if keys.shape[-1] not in HEAD_SIZES or getattr(config, "attn_logit_softcapping", None) is not None:
        return 0
    groups = int(config.num_attention_heads) // int(keys.shape[1])
    return groups if groups <= MOST_GROUPS else 0


def _join(model: nn.Module, kernels: bool) -> None:
    for module in list(model.modules()):
        for names in TOGETHER:
            parts = [getattr(module, name, None) for name in names]
            if all(type(part) is nn.Linear for part in parts):
                _join_parts(module, names, parts, kernels)


def _join_parts(module: nn.Module, names: Sequence[str], parts: Sequence[Any], kernels: bool) -> None:
    if len({part.in_features for part in parts}) > 1 or len({part.bias is None for part in parts}) > 1:
        return
    weight = torch.cat([part.weight.data for part in parts])
    bias = None if parts[0].bias is None else torch.cat([part.bias.data for part in parts])
    joint, start = RowLinear(weight, bias, kernels=kernels), 0
    for name, part in zip(names, parts, strict=True):
        setattr(module, name, Part(joint, start, start + part.out_features))
        start += part.out_features
        part.weight = None  # its memory goes back now, not when all layers are done


def _replace_linears(model: Any, kernels: bool) -> None:
    head = model.get_output_embeddings()
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if type(child) is nn.Linear:
                out = torch.float32 if child is head else None  # rounded logits would tie
                bias = None if child.bias is None else child.bias.data
                setattr(module, name, RowLinear(child.weight.data, bias, kernels=kernels, out=out))


def _replace_norms(model: nn.Module) -> None:
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if type(child).__name__.endswith("RMSNorm") and hasattr(child, "variance_epsilon") and _same_norm(child):
                setattr(module, name, RowNorm(child))


def _same_norm(norm: Any) -> bool:
    """Whether our kernel computes what this norm computes; families differ in what they do with the weight."""
    x = torch.randn(2, norm.weight.numel(), device=norm.weight.device, dtype=norm.weight.dtype)
    expected, found = norm(x), RowNorm(norm)(x)
    return bool(torch.allclose(expected.float(), found.float(), rtol=0.02, atol=0.02))

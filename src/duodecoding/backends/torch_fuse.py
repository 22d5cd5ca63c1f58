"""Joining what a layer does between its products into the kernels around it, in the graph that is compiled.

A pass over few rows is products, which read weights, and small kernels between them, which take a microsecond or two each, many
times in every layer. Two of them go: the activation of a gated MLP becomes the end of the product it follows, and adding to the
residual becomes the beginning of the norm that comes next. They are found by what is computed, so nothing depends on the model's
code; where they are not found the layer stays as it is. What is rounded, and where, stays the same too.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx
from torch.nn import functional

HARMLESS = {operator.getitem, operator.add, operator.mul, functional.silu, functional.dropout, "view", "to", "chunk"}


def compile_fused(graph: fx.GraphModule, inputs: Sequence[Any], *, options: dict[str, Any]) -> Callable[..., Any]:
    """A backend for `torch.compile`: torch's own, on the joined graph."""
    fuse(graph)
    compiled: Callable[..., Any] = torch._inductor.compile(graph, list(inputs), options=options)
    return compiled


def fuse(graph: fx.GraphModule) -> int:
    """Join what can be joined; how much was."""
    nodes = list(graph.graph.nodes)
    done = sum(_fuse_gate(graph.graph, node) for node in nodes if node.target is operator.mul)
    done += sum(_fuse_norm(graph.graph, node) for node in nodes if _is_op(node, "rms_norm"))
    if done:
        graph.recompile()
    return done


def _fuse_gate(graph: fx.Graph, product: fx.Node) -> bool:
    """silu(the first half of a product) * the second half."""
    silu, up = product.args
    if not (isinstance(silu, fx.Node) and isinstance(up, fx.Node)):
        return False
    silu, up = (silu, up) if silu.target is functional.silu else (up, silu)
    if silu.target is not functional.silu:
        return False
    gate = silu.args[0]
    (whole, first), (other, second) = _half(gate), _half(up)
    found = _linear_of(whole)
    if found is None or other is not whole or (first, second) != (0, 1) or _value(found).shape[0] > 1:
        return False
    if [len(node.users) for node in (gate.args[0], silu, gate, up)] != [2, 1, 1, 1]:  # the product is of use elsewhere
        return False
    with graph.inserting_before(product):
        joined = graph.call_function(torch.ops.duodecoding.gated.default, found.args[:2])
        shaped = graph.call_method("view", (joined, *_value(product).shape))
    shaped.meta["example_value"] = _value(product)
    product.replace_all_uses_with(shaped)
    _drop(graph, product)
    return True


def _fuse_norm(graph: fx.Graph, norm: fx.Node) -> bool:
    """norm(residual + a product)."""
    both, weight, eps = norm.args
    if not isinstance(both, fx.Node) or both.target is not operator.add:
        return False
    for residual, product in (both.args, both.args[::-1]):
        found = _linear_of(product)
        if found is not None and len(product.users) == 1 and _value(residual).shape == _value(both).shape:
            break
    else:
        return False
    with graph.inserting_before(both):
        joined = graph.call_function(torch.ops.duodecoding.add_norm.default, (found, residual, weight, eps))
        results = [graph.call_function(operator.getitem, (joined, i)) for i in range(2)]
    for node, result in zip((both, norm), results, strict=True):
        result.meta["example_value"] = _value(node)
        node.replace_all_uses_with(result)
    _drop(graph, norm)
    _drop(graph, both)
    return True


def _half(node: Any) -> tuple[Any, int]:
    """Of what a node is a half, and which one; -1: of nothing."""
    if not isinstance(node, fx.Node) or node.target is not operator.getitem:
        return None, -1
    of, which = node.args
    if of.target == "chunk" and of.args[1:] == (2,) and of.kwargs == {"dim": -1} and which in (0, 1):
        return of.args[0], which
    half = _value(of).shape[-1] // 2 if isinstance(_value(of), torch.Tensor) else 0
    halves = [(..., slice(0, half, None)), (..., slice(half, 2 * half, None))]
    return (of, halves.index(which)) if which in halves else (None, -1)


def _linear_of(node: Any) -> fx.Node | None:
    """The product whose parts, added up and rounded, are what this node is: see `torch_fast.RowLinear`."""
    if isinstance(node, fx.Node) and node.target is functional.dropout and node.args[2:3] == (False,):  # none while not training
        node = node.args[0]
    for method in ("view", "to"):
        if not isinstance(node, fx.Node) or node.op != "call_method" or node.target != method:
            return None
        node = node.args[0]
    while node.target is operator.add:
        node = node.args[0]
    found = node.args[0] if node.target is operator.getitem else None
    exact = True if found is None or not _is_op(found, "linear") else found.args[2]
    return None if exact else found


def _drop(graph: fx.Graph, node: fx.Node) -> None:
    """Take out what is of no use any more. Only what is known to do nothing else: torch's own way would take out every change in
    place whose result is not used, and that is how keys and values are stored."""
    if node.users or not (node.target in HARMLESS or _is_op(node, "linear") or _is_op(node, "rms_norm")):
        return
    inputs = node.all_input_nodes
    graph.erase_node(node)
    for before in inputs:
        _drop(graph, before)


def _is_op(node: fx.Node, name: str) -> bool:
    return str(node.target) == f"duodecoding.{name}.default"  # by name: without such a kernel nobody has defined it


def _value(node: Any) -> Any:
    """What a node stood for when the layer was traced."""
    return node.meta.get("example_value")

"""`duo doctor`: what is installed, what this machine has, what speculation can do here."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from duodecoding.cli.flags import (
    ENGINE,
    FLAT,
    NO_MACHINE_FLAGS,
    NO_REPORT_FLAGS,
    SHORT,
    MachineFlags,
    ReportFlags,
    ReportOptions,
    env_name,
    settings,
)
from duodecoding.cli.models import in_words
from duodecoding.types import EngineConfig

if TYPE_CHECKING:
    from duodecoding.cli.terminal import Terminal

ModelFlag = Parameter(
    alias=SHORT["model"], env_var=env_name("model"), group=ENGINE, show_default=False, help="Load this model too, and measure it."
)
SIZES = (1, 2, 4, 8, 16)  # tokens per pass


def doctor(
    *,
    options: Annotated[ReportFlags, FLAT] = NO_REPORT_FLAGS,
    model: Annotated[str | None, ModelFlag] = None,
    engine_flags: Annotated[MachineFlags, FLAT] = NO_MACHINE_FLAGS,
) -> int:
    """Say what is installed, what this machine has and what speculation can do here."""
    from duodecoding.cli import machine
    from duodecoding.cli.terminal import Terminal

    terminal = Terminal()
    facts: dict[str, Any] = {
        "versions": machine.versions(),
        "cores": machine.cores(),
        "memory": machine.memory(),
        "devices": machine.devices(),
    }
    facts["outlook"] = machine.outlook(facts["cores"]["physical"], facts["devices"]["llama_cpp_gpu_offload"])
    if model is not None:
        facts["model"] = check_model(replace(settings(EngineConfig, engine_flags), model=model), terminal)
    if settings(ReportOptions, options).json:
        terminal.print(json.dumps(facts, ensure_ascii=False, indent=2))
    else:
        _print(facts, terminal)
    return 0


def check_model(config: EngineConfig, terminal: Terminal) -> dict[str, Any]:
    """Load a model and measure what a pass over n tokens costs: that decides what guessing can gain."""
    from duodecoding import backends
    from duodecoding.cli.machine import pass_seconds
    from duodecoding.cli.session import leaving
    from duodecoding.models import resolve

    with leaving(terminal), terminal.busy(f"loading {config.model}"):
        target = backends.load_target(resolve(config.model, offline=config.offline).path, config)
        terminal.progress("measuring")
        try:
            seconds = pass_seconds(target, SIZES)
        finally:
            target.close()
    return {
        "name": config.model,
        "context": target.context,
        "vocabulary": target.vocabulary.size,
        "chat_template": target.vocabulary.chat_template is not None,
        "pass_seconds": seconds,
    }


def _print(facts: dict[str, Any], terminal: Terminal) -> None:
    cores, memory, devices = facts["cores"], facts["memory"], facts["devices"]
    terminal.heading("Installed")
    terminal.pairs({name: found or "not installed" for name, found in facts["versions"].items()})
    terminal.heading("\nMachine")
    rows = {
        "cores": f"{cores['physical']} physical, {cores['logical']} logical, {cores['allowed']} of them allowed to this process",
        "memory": f"{in_words(memory['total_bytes'])}" + _memory_detail(memory),
        "GPU, llama.cpp": "yes, see --gpu-layers" if devices["llama_cpp_gpu_offload"] else "no, this build runs on the CPU only",
        "GPU, torch": _cuda_line(devices["cuda"]),
    }
    terminal.pairs(rows)
    if "model" in facts:
        terminal.heading("\nModel")
        terminal.pairs(_model_rows(facts["model"]))
    terminal.heading("\nSpeculation")
    terminal.say_line(facts["outlook"])


def _memory_detail(memory: dict[str, int | None]) -> str:
    available, limit = memory["available_bytes"], memory["limit_bytes"]
    return (f", {in_words(available)} free" if available else "") + (f", limited to {in_words(limit)}" if limit else "")


def _cuda_line(names: list[str] | None) -> str:
    if names is None:
        return "torch is not installed"
    return ", ".join(names) if names else "torch sees no CUDA device"


def _model_rows(model: dict[str, Any]) -> dict[str, str]:
    seconds = model["pass_seconds"]
    return {
        "name": model["name"],
        "context": f"{model['context']} tokens",
        "vocabulary": f"{model['vocabulary']} tokens",
        "chat template": "yes" if model["chat_template"] else "no, use duo run --raw",
        "one token": f"{seconds[1] * 1e3:.1f} ms",
        "a pass over": ", ".join(f"{n} costs {seconds[n] / seconds[1]:.1f}" for n in SIZES[1:]) + " times that",
        "so guessing pays": f"from {seconds[8] / seconds[1]:.1f} tokens a round on, in passes over 8",
    }

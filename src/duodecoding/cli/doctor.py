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
ENGINES = {"native": "our own", "llamacpp": "llama.cpp", "torch": "torch"}
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

    terminal, config = Terminal(), settings(EngineConfig, engine_flags)
    facts: dict[str, Any] = {
        "versions": machine.versions(),
        "cores": machine.cores(),
        "memory": machine.memory(),
        "devices": machine.devices(),
        "own_engine": machine.own_engine(),
        "own_code": machine.own_code(),
        "bandwidth": machine.bandwidth(config.threads),
    }
    facts["outlook"] = machine.outlook(
        facts["cores"]["physical"],
        facts["devices"]["llama_cpp_gpu_offload"] or bool(facts["devices"]["cuda"]),
        facts["own_engine"]["engine"] == "native",
    )
    if model is not None:
        facts["model"] = check_model(replace(config, model=model), terminal)
    if settings(ReportOptions, options).json:
        terminal.print(json.dumps(facts, ensure_ascii=False, indent=2))
    else:
        _print(facts, terminal)
    return 0


def check_model(config: EngineConfig, terminal: Terminal) -> dict[str, Any]:
    """Load a model and measure what a pass over n tokens costs: that decides what guessing can gain."""
    from duodecoding import backends, measure
    from duodecoding.cli.machine import pass_seconds
    from duodecoding.cli.session import leaving
    from duodecoding.models import resolve

    with leaving(terminal), terminal.busy(f"loading {config.model}"):
        path = resolve(config.model, offline=config.offline).path
        target = backends.load_target(path, config)
        terminal.progress("measuring")
        try:
            seconds = pass_seconds(target, SIZES)
            on_gpu = backends.on_gpu(path, config)
            floor = measure.floor(target, on_gpu=on_gpu, device=config.device, threads=config.threads)
        finally:
            target.close()
    return {
        "name": config.model,
        "engine": target.engine,
        "context": target.context,
        "vocabulary": target.vocabulary.size,
        "chat_template": target.vocabulary.chat_template is not None,
        "pass_seconds": seconds,
        "weights_bytes": target.weights_bytes,
        "floor_seconds": floor.seconds if floor else None,
        "floor_of": floor.where if floor else None,
        "floor_share": floor.share(seconds[1]) if floor else None,
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
        "on the CPU run": _engine_line(facts["own_engine"]),
        "our own code": _own_code_line(facts["own_code"]),
        "copying": _bandwidth_line(facts["bandwidth"]),
    }
    terminal.pairs(rows)
    if "model" in facts:
        terminal.heading("\nModel")
        terminal.pairs(_model_rows(facts["model"]))
    terminal.heading("\nSpeculation")
    terminal.say_line(facts["outlook"])


def _engine_line(found: dict[str, str]) -> str:
    if found["engine"] == "native":
        return "our own engine, built for this processor; models that it cannot read: llama.cpp"
    return f"llama.cpp, not our own engine: {found['why']}"


def _own_code_line(found: str) -> str:
    if found == "compiled":
        return "compiled: what runs between two passes of the target is C"
    return "interpreted; beside a GPU DUO_BUILD_C=1 when installing saves a fifth and more of our own work between two passes"


def _memory_detail(memory: dict[str, int | None]) -> str:
    available, limit = memory["available_bytes"], memory["limit_bytes"]
    return (f", {in_words(available)} free" if available else "") + (f", limited to {in_words(limit)}" if limit else "")


def _cuda_line(devices: list[dict[str, Any]] | None) -> str:
    if devices is None:
        return "torch is not installed"
    lines = [f"{gpu['name']}, {in_words(gpu['free_bytes'])} of {in_words(gpu['total_bytes'])} free" for gpu in devices]
    return "; ".join(lines) or "torch sees no CUDA device"


def _bandwidth_line(bandwidth: dict[str, float | None]) -> str:
    """Measured just now; bytes read and bytes written are counted."""
    found = {"main memory": bandwidth["cpu"], "GPU": bandwidth["gpu"]}
    return ", ".join(f"{where} {speed / 1e9:,.1f} GB/s" for where, speed in found.items() if speed)


def _floor_line(model: dict[str, Any]) -> str:
    size = in_words(model["weights_bytes"])
    if model["floor_seconds"] is None:
        return f"not known: {size} of weights, and torch cannot measure the GPU's memory"
    least = f"{model['floor_seconds'] * 1e3:.2f} ms, to read {size} of weights from the {model['floor_of']}'s memory"
    return f"{least}; one token reaches {model['floor_share']:.0%} of that speed"


def _model_rows(model: dict[str, Any]) -> dict[str, str]:
    seconds = model["pass_seconds"]
    return {
        "name": model["name"],
        "engine": ENGINES[model["engine"]],
        "context": f"{model['context']} tokens",
        "vocabulary": f"{model['vocabulary']} tokens",
        "chat template": "yes" if model["chat_template"] else "no, use duo run --raw",
        "one token": f"{seconds[1] * 1e3:.1f} ms",
        "its floor": _floor_line(model),
        "a pass over": ", ".join(f"{n} costs {seconds[n] / seconds[1]:.1f}" for n in SIZES[1:]) + " times that",
        "so guessing pays": f"from {seconds[8] / seconds[1]:.1f} tokens a round on, in passes over 8",
    }

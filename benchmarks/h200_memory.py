"""Out of memory on a real card: what is said, and what is left behind.

    python benchmarks/h200_memory.py --source SmolLM2-135M-Instruct.Q4_1.gguf

Most of the card is taken by a block of our own. A model that does not fit is refused with the numbers; one that fits until its KV
cache or a pass needs more fails with an error, gives its memory back, and the next one is served.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig

sys.path.insert(0, str(Path(__file__).parent))
import common
import rig
from h200_verify import machine

from duodecoding import LLM, EngineConfig, SamplingParams
from duodecoding.backends.torch_slots import CacheShape
from duodecoding.errors import OutOfMemory

LEFT = 8e6  # bytes for a pass, when somebody else has the rest
SLACK = 64e6  # bytes that libraries keep for themselves once they have been used


def free() -> int:
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return int(torch.cuda.mem_get_info()[0])


def but(room: float) -> torch.Tensor:
    """A block that leaves so many bytes."""
    return torch.empty(int(free() - room), dtype=torch.uint8, device="cuda")


def config(source: Path, context: int) -> EngineConfig:
    return EngineConfig(model=str(source), backend="torch", mode="off", ctx_size=context, compile="off", device="cuda")


def unpacked(source: Path, folder: Path) -> Path:
    """The same model as a directory: transformers reads a GGUF file in ten seconds, and it is read often here."""
    from transformers import AutoTokenizer

    AutoTokenizer.from_pretrained(str(source.parent), gguf_file=source.name).save_pretrained(str(folder))
    read = rig.read_gguf(source)
    rig.build(read.shape, "cpu", torch.bfloat16, read).save_pretrained(str(folder))
    return folder


def refused(source: Path, room: float, context: int) -> dict[str, Any]:
    """Try to load, and to answer, with so much room on the card. If a long prompt does not fit, a short one still should."""
    before = free()
    block = but(room)
    found: dict[str, Any] = {"room_mb": room / 1e6, "loaded": False, "said": "nothing"}
    try:
        with LLM.from_config(config(source, context)) as llm:
            found["loaded"] = True
            try:
                llm.generate([5] * (context - 40), SamplingParams(max_tokens=4))
            except OutOfMemory as error:
                found["said"] = str(error)
                found["short_prompt_served"] = served(llm)
    except OutOfMemory as error:
        found["said"] = str(error)
    found["left_behind_mb"] = (room - free()) / 1e6
    found["of_torch_mb"] = (torch.cuda.memory_reserved() - block.numel()) / 1e6
    del block
    return found | {"gone_mb": (before - free()) / 1e6}


def in_a_pass(source: Path, context: int) -> dict[str, Any]:
    """A model that was loaded with room enough, then somebody else takes the rest of the card: a long prompt fails, and is served
    once the card is free again."""
    before = free()
    found: dict[str, Any] = {"said": "nothing"}
    prompt, four = [5] * (context - 40), SamplingParams(max_tokens=4, ignore_eos=True)
    with LLM.from_config(config(source, context)) as llm:
        found["short_prompt_served_before"] = served(llm)
        block = but(LEFT)
        try:
            llm.generate(prompt, four)
        except OutOfMemory as error:
            found["said"] = str(error)
        found["short_prompt_served_meanwhile"] = served(llm)
        del block
        torch.cuda.empty_cache()
        found["served_afterwards"] = len(llm.generate(prompt, four).token_ids) == 4
    return found | {"left_behind_mb": (before - free()) / 1e6}


def torch_bytes(source: Path, context: int) -> float:
    """Weights and KV cache, which are asked for before anything is loaded."""
    weights = sum(file.stat().st_size for file in source.glob("*.safetensors"))
    per_token = CacheShape.of(AutoConfig.from_pretrained(str(source))).bytes_per_token(torch.bfloat16)
    return float(weights + per_token * (context + EngineConfig(model="").max_nodes + 1))


def served(llm: LLM) -> bool:
    return len(llm.generate([5] * 20, SamplingParams(max_tokens=4, ignore_eos=True)).token_ids) == 4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--source", type=Path, required=True)
    source = parser.parse_args().source
    with tempfile.TemporaryDirectory() as folder:
        found = cases(unpacked(source, Path(folder)))
    common.write("h200_memory", {"source": source.name}, found)


def cases(source: Path) -> dict[str, Any]:
    with LLM.from_config(config(source, 512)) as llm:  # libraries set themselves up
        llm.generate([5] * 100, SamplingParams(max_tokens=4))
    found: dict[str, Any] = {"gpu": machine(), "refused": {}}
    start = time.monotonic()
    needed = torch_bytes(source, 8192)
    for room, context in (
        (100e6, 512),
        (300e6, 8192),
        (needed + 8e6, 8192),
        (needed + 110e6, 8192),
        (needed + 160e6, 8192),
        (needed + 1e9, 8192),
    ):
        case = refused(source, room, context)
        found["refused"][f"{room / 1e6:.0f} MB, context {context}"] = case
        print(f"{time.monotonic() - start:.0f} s", room, context, case, flush=True)
    found["in a pass"] = in_a_pass(source, 8192)
    print(found["in a pass"], flush=True)
    with LLM.from_config(config(source, 512)) as llm:
        found["served afterwards"] = served(llm)
    found["nothing left behind"] = all(abs(case["left_behind_mb"]) * 1e6 < SLACK for case in found["refused"].values())
    return found


if __name__ == "__main__":
    main()

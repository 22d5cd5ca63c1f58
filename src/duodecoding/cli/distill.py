"""`duo distill`: make a draft for a target, out of the target."""

from __future__ import annotations

import json
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from duodecoding.cli.flags import FLAT, OUTPUT, derive, settings
from duodecoding.cli.interrupts import SIGNALS, exit_code
from duodecoding.errors import BackendMissing, UsageError

if TYPE_CHECKING:
    from duodecoding.cli.terminal import Terminal
    from duodecoding.distill.pipeline import Run
    from duodecoding.distill.recipes import Text
    from duodecoding.distill.student import Student

TARGET = Parameter(help="The model to draft for: a Llama as a GGUF file or a directory, a hub name or a built-in name.")


@dataclass(frozen=True, slots=True)
class DistillOptions:
    """What `duo distill` makes, of what, and how long it may take."""

    out: str = ""
    layers: str = "4"
    vocab: int = 0
    prompts: str = ""
    held_out: str = ""
    minutes: float = 30.0
    loss: str = "forward"
    quant: str = "q8_0"
    quant_embedding: str = ""
    device: str = "auto"
    work: str = ""
    seed: int = 0
    resume: bool = False
    json: bool = False


DISTILL_HELP = {
    "out": "The GGUF file to write.",
    "layers": "How many of the target's layers, or which: 0,1,28,29. With 0+1,28+29 each layer does the work of two.",
    "vocab": "Tokens that the draft knows, the most frequent ones: a smaller head is faster. 0: all.",
    "prompts": "JSONL file, plain or gzipped, one object with a prompt a line. Without it the package's own.",
    "held_out": "Folder of JSONL prompts to measure with later: none that shares eight words in a row with them is learnt from.",
    "minutes": "Time for all of it. A third of it goes to letting the target answer prompts.",
    "loss": "Divergence of draft and target: forward, reverse or mixed.",
    "quant": "Type of the matrices: q8_0, q5_0, q4_0 or f16.",
    "quant_embedding": "Type of the embeddings, which are the head too. Without it as the others.",
    "device": "cpu, cuda or cuda:N. auto: a GPU if there is one.",
    "work": "Folder for answers and checkpoints, for --resume. Without it one beside the file.",
    "seed": "Of prompts, answers and order.",
    "resume": "Go on with what is in the work folder, for as many minutes more.",
    "json": "Print one JSON object instead of a table.",
}
if TYPE_CHECKING:
    DistillFlags = DistillOptions
else:
    DistillFlags = derive(DistillOptions, DISTILL_HELP, OUTPUT)
NO_DISTILL_FLAGS = DistillFlags()


def distill(target: Annotated[str, TARGET], /, *, options: Annotated[DistillFlags, FLAT] = NO_DISTILL_FLAGS) -> int:
    """Make a draft for a target: some of its layers, trained on its own answers, as a GGUF file."""
    chosen = settings(DistillOptions, options)
    out = checked(chosen)
    from duodecoding import models
    from duodecoding.backends.torch_model import choose_device
    from duodecoding.cli.terminal import Terminal
    from duodecoding.distill import train
    from duodecoding.distill.pipeline import Candidate, Options, Run

    terminal = Terminal()
    work = Path(chosen.work) if chosen.work else out.with_suffix(".work")
    training = train.Settings(loss=chosen.loss, seed=chosen.seed)
    plan = Options(chosen.minutes, seed=chosen.seed, resume=chosen.resume, training=training)
    texts = prompts_of(chosen, terminal)
    with terminal.bar() as show:
        run = Run(
            models.resolve(target).path,
            choose_device(chosen.device),
            plan,
            lambda what, share, more: show(f"{what}: {more}", share),
        )
        run.generate(texts, work, Path(chosen.held_out) if chosen.held_out else None)
        [student] = run.train([Candidate(out.stem, chosen.layers, chosen.vocab, chosen.quant)], work)
        run.write(student, out, chosen.quant, chosen.quant_embedding)
    said(run, student, out, terminal, as_json=chosen.json)
    return exit_code(SIGNALS[0]) if run.progress.stopped else 0


def checked(chosen: DistillOptions) -> Path:
    """What can be known to be wrong before anything is loaded."""
    if not chosen.out:
        raise UsageError("there is no place to write the draft to", fix="Name a file with --out.")
    if chosen.minutes <= 0:
        raise UsageError(f"minutes is {chosen.minutes:g}", "it must be above 0")
    missing = [name for name in ("torch", "transformers", "gguf") if find_spec(name) is None]
    if missing:
        raise BackendMissing(
            "cannot train a draft", f"{', '.join(missing)} not installed", "Run: pip install 'duodecoding[distill]'"
        )
    from duodecoding.distill.export import check_quant

    check_quant(chosen.quant)
    check_quant(chosen.quant_embedding or chosen.quant)
    return Path(chosen.out)


def prompts_of(chosen: DistillOptions, terminal: Terminal) -> list[Text]:
    from duodecoding.distill import data, pipeline

    return data.read_prompts(Path(chosen.prompts), terminal.warn) if chosen.prompts else pipeline.own_prompts()


def said(run: Run, student: Student, out: Path, terminal: Terminal, *, as_json: bool) -> None:
    entries = [entry for entry in run.progress.log if "now" in entry]
    best: dict[str, Any] = max(
        (entry[which] for entry in entries for which in ("now", "mean")), key=lambda found: found["all"]["top1"]
    )
    if as_json:
        about = {"steps": run.progress.step, "answer_tokens": run.corpus.answer_tokens, "agreement": best}
        terminal.print(json.dumps({"out": str(out), "bytes": out.stat().st_size, **about}))
        return
    rows = [(kind, *(f"{found[f'top{k}']:.3f}" for k in (1, 2, 4)), str(found.get("tokens", ""))) for kind, found in best.items()]
    columns = ("prompts held out", "top 1", "top 2", "top 4", "tokens")
    terminal.table(columns, rows, right=columns[1:])
    terminal.note(f"{student.name}: {out.stat().st_size / 1e6:.1f} MB in {out}, after {run.progress.step} steps")
    terminal.note(f"try it: duo pair {run.target} {out}")

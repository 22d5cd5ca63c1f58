"""Makes drafts of a target: several candidates trained at once on the same answers, so that they can be compared.

python benchmarks/make_draft.py --target m.gguf --prompts prompts.jsonl.gz --held-out tasks/ --out out/ --minutes 9 \\
    --data-dir data/ [--resume] [--candidates "thin4=0,1,28,29;fat2=0+1,28+29;trim=0,1,28,29@16384"]

A candidate is NAME=LAYERS[@VOCABULARY][:QUANT]; with the quant q4_0 it is trained as such a file has it.
Writes NAME-QUANT.gguf for every quant and make_draft.json: the log of loss and agreement,
agreement on the held-out folder (read for this and for refusing what overlaps with it, never for training or choosing), speeds.
Answers and checkpoints stay in --data-dir: a later run with --resume goes on with both, and adds answers as time allows.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import asdict
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent.parent / "src"))

from duodecoding.distill import data, train
from duodecoding.distill.pipeline import Candidate, Options, Run

CANDIDATES = "thin4=0,1,28,29;fat2=0+1,28+29;thin4-16k=0,1,28,29@16384"


def candidate(text: str) -> Candidate:
    name, _, rest = text.partition("=")
    rest, _, quant = rest.partition(":")
    layers, _, vocab = rest.partition("@")
    return Candidate(name, layers, int(vocab or 0), quant)


class Log:
    """A line at every change of phase and every few seconds."""

    def __init__(self) -> None:
        self._began, self._last, self._phase = time.monotonic(), 0.0, ""

    def __call__(self, phase: str, share: float, details: str) -> None:
        now = time.monotonic() - self._began
        if phase != "train" or now - self._last > 10:
            self._last = now
            print(f"{now:7.1f} s  {phase:9} {share:4.0%}  {details}", flush=True)


def tasks(folder: Path) -> list[tuple[str, str]]:
    return [
        (file.stem, json.loads(line)["turns"][0])
        for file in sorted(folder.glob("*.jsonl"))
        for line in file.read_text().splitlines()
    ]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", type=Path, required=True)
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--held-out", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--data-dir", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=9.0)
    parser.add_argument("--data-share", type=float, default=0.35)
    parser.add_argument("--candidates", default=CANDIDATES)
    parser.add_argument("--quants", default="q8_0,q4_0")
    parser.add_argument("--quant-embedding", default="")
    parser.add_argument("--loss", default="forward")
    parser.add_argument("--rate", type=float, default=1.5e-3)
    parser.add_argument("--tokens", type=int, default=0)
    parser.add_argument("--rows", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--resume", action="store_true")
    return parser.parse_args()


def main() -> None:
    given = arguments()
    log = Log()
    training = train.Settings(loss=given.loss, rate=given.rate, tokens=given.tokens, checkpoint_every=150.0, evaluate_every=60.0)
    options = Options(given.minutes, given.data_share, rows=given.rows, resume=given.resume, training=training)
    run = Run(given.target, torch.device(given.device), options, log)
    prompts = data.read_prompts(given.prompts, print)
    log("read", 1.0, f"{len(prompts)} prompts")
    run.generate(prompts, given.data_dir, given.held_out)
    log("generate", 1.0, f"{len(run.corpus.texts)} answers, {run.corpus.answer_tokens} tokens; {len(run.held_out.texts)} held out")
    students = run.train([candidate(text) for text in given.candidates.split(";")], given.data_dir)
    log("train", 1.0, f"{run.progress.step} steps, {run.progress.tokens} tokens in {run.progress.seconds:.0f} s")
    for student in students:
        for quant in given.quants.split(","):
            run.write(student, given.out / f"{student.name}-{quant}.gguf", quant, given.quant_embedding)
    log("write", 1.0, str(given.out))
    record = {"settings": {"minutes": given.minutes, "candidates": given.candidates, "training": asdict(training)}}
    record |= {"answers": len(run.corpus.texts), "answer_tokens": run.corpus.answer_tokens, "log": run.progress.log}
    if given.held_out:
        record["tasks"] = run.judge(students, tasks(given.held_out))
        for name, found in record["tasks"].items():
            print(f"{name:12}", {kind: (row["top1"], row["top4"]) for kind, row in found.items()}, flush=True)
    (given.out / "make_draft.json").write_text(json.dumps(record, indent=1) + "\n")
    log("judge", 1.0, str(given.out / "make_draft.json"))


if __name__ == "__main__":
    main()

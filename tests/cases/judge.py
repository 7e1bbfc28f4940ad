"""How well does the diagnosis do on programs whose fault is known?

    python -m tests.cases.judge                   # all programs; prints what went wrong
    python -m tests.cases.judge dropout lstm      # those with one of these words in their name
    python -m tests.cases.judge --write           # all, one seed each, into results.json

Each program is built twice: once for ``checkup``, once for ``watch`` around its own loop. It is
named if the root causes of either hold its slug. ``bpkit/diagnosis/results.json`` is what the
book's table and ``test_diagnosis.py`` read.
"""

from __future__ import annotations

import io
import json
import multiprocessing
import sys
import time
import warnings
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from contextlib import redirect_stdout
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

import torch

from bpkit import checkup, watch
from tests.cases import PROGRAMS, Program

MODULES = ("data", "forward", "backward", "loops", "nonfinite", "reports", "sound", "ordinary")
RESULTS = Path(__file__).parents[2] / "bpkit" / "diagnosis" / "results.json"


def programs() -> dict[str, Program]:
    """Name -> program, all of them."""
    for module in MODULES:
        import_module(f"tests.cases.{module}")
    return {program.name: program for program in PROGRAMS}


def plain(model, loss_fn, optimizer, batches) -> None:
    for batch in list(batches) * 3:
        optimizer.zero_grad()
        loss_fn(model, batch).backward()
        optimizer.step()


def diagnose(program: Program, argument) -> tuple[list, str]:
    """Findings of ``checkup`` on a fresh build and of ``watch`` around the program's own loop on
    another, and what the loop raised."""
    torch.manual_seed(0)
    model, loss_fn, optimizer, batches, *_ = program.make(argument)
    findings = list(checkup(model, loss_fn, batches, optimizer).findings)
    torch.manual_seed(0)
    model, loss_fn, optimizer, batches, *train = program.make(argument)
    raised = ""
    log = watch(model, *(optimizer if isinstance(optimizer, tuple) else (optimizer,)))
    try:
        with log, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            (train[0] if train else plain)(model, loss_fn, optimizer, batches)
    except Exception as error:
        raised = f"{type(error).__name__}: {error}"
    return findings + list(log.report().findings), raised


@dataclass
class Verdict:
    """What was said of one program. ``sick`` is how it was built; ``named`` whether the fault was
    found; ``beside`` the other faults: false alarms where it is not sick; ``raised`` what its loop
    ended with."""

    program: str
    argument: bool | int
    expect: str | None
    sick: bool
    named: bool
    beside: list[str]
    text: str
    seconds: float
    raised: str = ""

    @property
    def good(self) -> bool:
        sound = self.sick or not self.raised
        return self.named == self.sick and not self.beside and sound

    def __str__(self) -> str:
        kind = f"expects {self.expect}" if self.sick else "healthy"
        head = f"{'ok ' if self.good else 'BAD'} {self.program}({self.argument}) {kind}"
        return f"{head}, {self.seconds:.1f} s\n{self.text}"


def judge(program: Program, argument) -> Verdict:
    """Diagnose one program, sick (``True``) or not (``False``, or a seed)."""
    begun = time.monotonic()
    with redirect_stdout(io.StringIO()):
        findings, raised = diagnose(program, argument)
    sick = argument is True
    right = {program.expect, *program.also} if sick else set()
    faults = {finding.slug for finding in findings if finding.severity == "fault"}
    said = {finding.slug for finding in findings} if program.note else faults
    lines = [f"      {f.severity} {f.slug} @ {f.where}: {f.evidence}" for f in findings]
    lines += [f"      raised {raised}"] if raised else []
    return Verdict(
        program.name, argument, program.expect, sick, bool(right & said), sorted(faults - right),
        "\n".join(lines), time.monotonic() - begun, raised,
    )  # fmt: skip


def _judge_by_name(task: tuple[str, bool | int]) -> Verdict:
    torch.set_num_threads(1)
    name, argument = task
    return judge(programs()[name], argument)


def judge_all(wanted: Iterable[Program], seeds: Iterable[int]) -> list[Verdict]:
    """In two processes, in the order of the names."""
    tasks = [
        (program.name, argument)
        for program in sorted(wanted, key=lambda p: p.name)
        for argument in ((True, False) if program.expect else seeds)
    ]
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(2, mp_context=context) as pool:
        return list(pool.map(_judge_by_name, tasks, chunksize=8))


def results(verdicts: list[Verdict]) -> dict:
    """The table: for each slug what was tried, named, missed and said beside; false alarms."""
    sick = [v for v in verdicts if v.sick]
    table = {}
    for slug in sorted({v.expect for v in sick}):
        tried = [v for v in sick if v.expect == slug]
        table[slug] = {
            "tried": len(tried),
            "named": sum(v.named for v in tried),
            "missed": [v.program for v in tried if not v.named],
            "beside": {v.program: v.beside for v in tried if v.beside},
        }
    return {
        "sick": len(sick),
        "twins": sum(v.argument is False for v in verdicts),
        "healthy": sum(v.expect is None for v in verdicts),
        "alarms": {v.program: v.beside for v in verdicts if not v.sick and v.beside},
        "faults": table,
    }


def main(words: list[str]) -> None:
    write = "--write" in words
    words = [word for word in words if word != "--write"]
    if write and words:
        sys.exit("--write judges all programs; leave the words out")
    wanted = [p for p in programs().values() if not words or any(w in p.name for w in words)]
    verdicts = judge_all(wanted, seeds=(0,) if write else (0, 1, 2))
    for verdict in verdicts:
        if words or not verdict.good:
            print(verdict)
    missed = sum(v.sick and not v.named for v in verdicts)
    beside = sum(v.sick and bool(v.beside) for v in verdicts)
    alarms = sum(not v.sick and bool(v.beside) for v in verdicts)
    print(f"{len(wanted)} programs, {missed} missed, {beside} with something beside, "
          f"{alarms} false alarms")  # fmt: skip
    if write:
        RESULTS.write_text(json.dumps(results(verdicts), indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])

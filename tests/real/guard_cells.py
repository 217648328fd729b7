"""What the guard costs and brings, measured in steps: a program, not a test (`python -m tests.real.guard_cells -h`).

Several engines over the same weights answer the same prompts, each at its own pace, with a constant number of requests;
a request that ends is replaced by the next one. They take turns step by step, the one that has committed least next, so
that a machine which changes its speed changes it for all. Every step is timed alone. Engines keep what they learned
from one class of prompts to the next, and know nothing at the first: its costs are part of the result. All memory for
keys, values and taps is written once before, as it is in an engine that has run for a while: with `--fresh` it is not.

An engine that is ahead may have read prompts that the others read after the end, so tokens alone would compare other
work: a speed is the plain engine's seconds for the same tokens and rows of prompts over the engine's own. Its tables
are in docs/benchmarks.md, "The guard".
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import shutil
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import outrider_zoo
import torch
from safetensors.torch import load_file, save_file

from outrider import LLM
from outrider.bench.conditions import conditions
from outrider.engine.engine import Engine
from outrider.evaluate import workloads
from outrider.evaluate.conversation import encode
from outrider.types import DraftParams, Request, SamplingParams

MAX_TOKENS, NUM_BLOCKS = 128, 8
SETS = {"math": ["gsm8k"], "code": ["humaneval", "mbpp"], "chat": ["mt-bench", "chat"], "JSON": ["json"]}
RANDOM = "random tokens"
Prompts = Sequence[tuple[int, ...]]


@dataclass(frozen=True)
class Work:
    """What was done in how long: tokens committed, rows of prompts read."""

    tokens: int = 0
    rows: int = 0
    seconds: float = 0.0

    def __add__(self, other: Work) -> Work:
        return Work(self.tokens + other.tokens, self.rows + other.rows, self.seconds + other.seconds)

    def __sub__(self, other: Work) -> Work:
        return Work(self.tokens - other.tokens, self.rows - other.rows, self.seconds - other.seconds)


@dataclass
class Runner:
    """One engine in a class of prompts: its work, that of steps without prompts, and the work at each block's end."""

    name: str
    engine: Engine
    prompts: Iterator[tuple[int, ...]]
    workload: str
    done: Work = Work()
    pure: Work = Work()
    marks: list[Work] = field(default_factory=lambda: [Work()])
    number: Iterator[int] = field(default_factory=itertools.count)
    waiting: dict[str, int] = field(default_factory=dict)

    def add(self, max_tokens: int = MAX_TOKENS, *, off: bool = False) -> None:
        """The next prompt as a request."""
        request_id, params = (
            f"{self.workload}-{next(self.number)}",
            SamplingParams(temperature=0, max_tokens=max_tokens),
        )
        drafting, prompt = DraftParams(workload=self.workload, off=off), next(self.prompts)
        self.waiting[request_id] = len(prompt)
        self.engine.add(Request(request_id=request_id, prompt_ids=prompt, params=params, drafting=drafting))

    def step(self) -> None:
        """One step; whoever ended is replaced."""
        began = time.perf_counter()
        outputs = self.engine.step()
        seconds = time.perf_counter() - began
        rows = sum(self.waiting.pop(output.request_id, 0) for output in outputs)
        work = Work(sum(len(output.token_ids) for output in outputs), rows, seconds)
        self.done += work
        self.pure += Work() if rows else work
        for output in outputs:
            if output.finish_reason is not None:
                self.add()

    def mark(self, goal: float) -> None:
        """Note a block's end when it is reached."""
        if self.done.tokens >= goal * len(self.marks):
            self.marks.append(self.done)

    def end(self) -> None:
        """Abort what still runs."""
        for request_id in list(self.engine._sequences):
            self.engine.abort(request_id)


def useless_drafter(folder: Path) -> str:
    """The zoo's EAGLE-3 with random weights."""
    source = Path(outrider_zoo.__file__).parent / "smollm2" / "eagle3"
    shutil.copytree(source, folder)
    torch.manual_seed(0)
    for path in folder.glob("*.safetensors"):
        weights = load_file(path)
        drawn = {
            name: torch.ones_like(value) if value.dim() == 1 else torch.randn(value.shape).mul(0.03).to(value.dtype)
            for name, value in weights.items()
            if value.is_floating_point()
        }
        save_file(weights | drawn, path, metadata={"format": "pt"})
    return str(folder)


def settings_of(name: str, useless: str) -> dict[str, Any] | None:
    """An engine's speculative config: plain, useless, synthetic0, METHOD (guarded) or METHOD:N (fixed).

    A second plain one, `plain2`, shows the noise.
    """
    method, _, length = name.partition(":")
    if name.startswith("plain"):
        return None
    if name == "useless":
        return {"method": "eagle3", "model": useless, "num_speculative_tokens": 4, "guard": True}
    if name == "synthetic0":
        synthetic = {"rejection_sample_method": "synthetic", "synthetic_acceptance_rates": [0, 0, 0, 0]}
        return {"method": "eagle3", "num_speculative_tokens": 4, "guard": True, **synthetic}
    return {"method": method, "num_speculative_tokens": int(length or 4), "guard": not length}


def prompts_of(llm: LLM, workload: str, folder: Path) -> Prompts:
    """A class's prompts as token ids."""
    if workload == RANDOM:
        draw, size = random.Random(0), llm.engine.model.config.vocab_size
        return [tuple(draw.randrange(size) for _ in range(32)) for _ in range(400)]
    found = [prompt for name in SETS[workload] for prompt in workloads.load(name, folder=folder)]
    return [encode(llm, [{"role": "user", "content": prompt.turns[0]}]) for prompt in found]


def write_memory(engine: Engine) -> None:
    """Write every page of an engine's memory, so that no step waits for the system to hand one out."""
    memory = engine.target.memory
    for table in [*memory.taps.values(), *(part for layer in memory.cache for part in (layer.keys, layer.values))]:
        table.zero_()


def measure(llms: dict[str, LLM], load: int, steps: int, workload: str, prompts: Prompts) -> dict[str, Any]:
    """Speeds over the first engine's, by engine: of all blocks, and the standard error of the mean of them.

    The first requests end one after the other, so that no engine reads all its prompts in the same steps.
    """
    runners = [Runner(name, llm.engine, itertools.cycle(prompts), workload) for name, llm in llms.items()]
    goal = load * steps
    for runner in runners:
        for place in range(load):
            runner.add(MAX_TOKENS * (place + 1) // load)
    while waiting := [runner for runner in runners if runner.done.tokens < goal]:
        runner = min(waiting, key=lambda item: item.done.tokens)
        runner.step()
        runner.mark(goal / NUM_BLOCKS)
    plain = runners[0]
    token_s = plain.pure.seconds / plain.pure.tokens
    row_s = (plain.done.seconds - token_s * plain.done.tokens) / plain.done.rows

    def speed(work: Work) -> float:
        return (token_s * work.tokens + row_s * work.rows) / work.seconds

    cell: dict[str, Any] = {"load": load, "class": workload, "steps": steps, "plain_token_s": token_s}
    cell |= {"plain_prompt_row_s": row_s, "ratio": {}, "error": {}}
    blocks = [b - a for a, b in itertools.pairwise(plain.marks)]
    for runner in runners:
        mine = [b - a for a, b in itertools.pairwise(runner.marks)]
        pairs = [speed(own) / speed(its) for own, its in zip(mine, blocks, strict=False)]
        cell["ratio"][runner.name] = speed(runner.done) / speed(plain.done)
        cell["error"][runner.name] = statistics.stdev(pairs) / len(pairs) ** 0.5
        runner.end()
    return cell


def main() -> None:
    """Measure and print, a row a cell; `--out` keeps every number and the conditions."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--loads", default="1,4,8,32", help="requests at a time")
    parser.add_argument(
        "--engines", default="plain,useless,synthetic0,eagle3", help="plain, useless, synthetic0, METHOD, METHOD:N"
    )
    parser.add_argument("--classes", default=",".join([*SETS, RANDOM]))
    parser.add_argument("--steps", type=int, default=512, help="of plain decoding, a class")
    parser.add_argument("--fresh", action="store_true", help="memory that was never written, as after a start")
    parser.add_argument("--data-dir", type=Path, required=True, help="folder of the public sets")
    parser.add_argument("--out", type=Path, required=True, help="a JSON file")
    wishes = parser.parse_args()
    names, cells = wishes.engines.split(","), []
    with tempfile.TemporaryDirectory() as scratch:
        useless = useless_drafter(Path(scratch) / "useless")
        for load in map(int, wishes.loads.split(",")):
            plain = LLM("smollm2", max_num_seqs=load, enable_prefix_caching=False)
            llms = {name: plain.sibling(settings_of(name, useless)) for name in names}
            for name, llm in llms.items():
                if not wishes.fresh:
                    write_memory(llm.engine)
                warm = Runner(name, llm.engine, iter([(1,) * 40] * 2), "")
                warm.add(16, off=True)
                while llm.engine.has_work:
                    llm.engine.step()
            for workload in wishes.classes.split(","):
                cells.append(measure(llms, load, wishes.steps, workload, prompts_of(plain, workload, wishes.data_dir)))
                shown = " ".join(
                    f"{name} {cells[-1]['ratio'][name]:.3f}±{cells[-1]['error'][name]:.3f}" for name in names
                )
                print(f"load {load} {workload}: {shown}", flush=True)
                told = conditions(plain, {}, {"cells": cells})
                wishes.out.write_text(json.dumps(told, indent=1), encoding="utf-8")
    for name in names:
        print(f"{name}: geometric mean {statistics.geometric_mean(cell['ratio'][name] for cell in cells):.3f}")


if __name__ == "__main__":
    main()

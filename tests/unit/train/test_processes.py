"""Training by several processes: the same parameters as one, and an end for all where one of them ends."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.kit import lesson
from tests.kit.command import COMMAND, ENVIRONMENT, TIMEOUT_S

CHANGES: dict[str, Any] = {"epochs": 1.0, "optimizer": "adamw", "learning_rate": 1e-3, "eval_every": 100}
SCRIPT = """
import json, sys
from pathlib import Path
from outrider.text.tokenizer import Tokenizer
from outrider.train.corpus import read_corpus
from outrider.train.processes import joined
from tests.kit import lesson

target, corpus, run, changes = sys.argv[1:]
changes = json.loads(changes) | {"states": Path(run) / "states"}
with joined():
    llm = lesson.load_target(target)
    pairs = read_corpus(Path(corpus), vocab_size=lesson.VOCAB, max_len=64)
    lesson.trainer_of("eagle3", llm, pairs, Path(run) / "run", **changes).run()
"""


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A target and a corpus."""
    folder = tmp_path_factory.mktemp("lesson")
    target = lesson.save_target(folder / "target")
    return target, lesson.write_corpus(lesson.answers(lesson.load_target(target), 60), folder / "corpus.jsonl")


def state_of(run: Path) -> dict[str, torch.Tensor]:
    state: dict[str, torch.Tensor] = torch.load(run / "state.pt")["parameters"]
    return state


def test_two_processes_train_what_one_does(files: tuple[Path, Path], tmp_path: Path) -> None:
    """Both make the same folders and capture the same states at once."""
    target, corpus = files
    script = tmp_path / "script.py"
    script.write_text(SCRIPT, encoding="utf-8")
    arguments = [str(script), str(target), str(corpus)]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    environment = ENVIRONMENT | {"OMP_NUM_THREADS": "1"}
    for name, command in (("one", [sys.executable]), ("two", torchrun)):
        (tmp_path / name).mkdir()
        subprocess.run(
            [*command, *arguments, str(tmp_path / name), json.dumps(CHANGES)],
            env=environment,
            check=True,
            timeout=TIMEOUT_S,
        )
    one, two = tmp_path / "one" / "run", tmp_path / "two" / "run"
    first, second = state_of(one), state_of(two)
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        assert torch.allclose(tensor, second[name], atol=1e-5), name
    logs = [[json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()] for run in (one, two)]
    assert len(logs[0]) == len(logs[1]) > 3
    for ours, theirs in zip(*logs, strict=True):
        for key in ours.keys() - {"agreement"}:
            assert theirs[key] == pytest.approx(ours[key], rel=1e-4), key
    assert sorted(path.name for path in (tmp_path / "two" / "states").iterdir()) == [
        "capture.json",
        "shard-00000.safetensors",
    ]


def test_a_process_that_ends_ends_the_others(files: tuple[Path, Path], tmp_path: Path) -> None:
    """Each with one line: the reason, or that there was one elsewhere."""
    target, corpus = files
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    settings = ["--set", "train.dtype=float32", "--set", "train.draft_vocab_size=40", "--set", "train.held_out=0.2"]
    words = ["train", "eagle3", "--target", str(target), "--corpus", str(corpus), "--output", str(tmp_path / "run")]
    running = []
    for rank in range(2):
        group = {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        other = ["--set", f"train.grad_clip={1 + rank}"]
        running.append(
            subprocess.Popen(
                [*COMMAND, *words, *settings, *other],
                env=os.environ | ENVIRONMENT | group | {"OMP_NUM_THREADS": "1"},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    ends = []
    for process in running:
        with process:
            out, err = process.communicate(timeout=TIMEOUT_S)
        ends.append((process.returncode, out, [line for line in err.splitlines() if line.startswith("outrider:")]))
    (first, second) = ends
    assert [first[:2], second[:2]] == [(2, ""), (2, "")]
    assert len(second[2]) == 1 and "holds a run of another grad_clip" in second[2][0]
    assert len(first[2]) == 1 and "process 0 of 2 lost another one" in first[2][0]

"""The loop that trains any drafter: batches of captured states, one optimiser, acceptance that picks the checkpoint.

Every `eval_every` steps the network as it stands is written as a checkpoint and served by the real engine on held-out
prompts; the one with the highest mean acceptance length is kept. Training loss decides nothing. A run is resumed by the
same command and then equals an uninterrupted one, bit for bit on a CPU. Under torchrun each process takes its part of
every step's conversations. Not here: what a method learns (trainees), files (folder.py).
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from outrider.drafting import registry
from outrider.drafting.checkpoint import Checkpoint, read_checkpoint
from outrider.drafting.train_config import TrainConfig
from outrider.drafting.training import Teacher, Trainee
from outrider.errors import ConfigError
from outrider.evaluate.acceptance import Acceptance, measure
from outrider.llm import LLM
from outrider.models.fingerprint import fingerprint
from outrider.train.capture import Capture, Shard
from outrider.train.corpus import Corpus, Sample, split_by_prompt
from outrider.train.curve import CURVE, can_draw, draw
from outrider.train.folder import RunFolder
from outrider.train.optimizer import Optimizer
from outrider.train.order import Order, batch_of
from outrider.train.processes import add_up, rank, wait, world
from outrider.types import RequestStats

Progress = Callable[[str, int, int, str], None]
_SHARD_LEN = 64


@dataclass(frozen=True, kw_only=True)
class Places:
    """Where a run's files go. `states` None: the target runs again for every step and nothing of it is kept."""

    run: Path
    states: Path | None = None


class Trainer:
    """One run. `llm` is a plain LLM over the target; it serves the measurements and gives the states."""

    def __init__(
        self, method: str, llm: LLM, corpus: Corpus, config: TrainConfig, places: Places, progress: Progress
    ) -> None:
        self.method, self.config, self._llm, self._progress = method, config, llm, progress
        target = llm.engine.model
        samples, held_out = split_by_prompt(corpus.samples, seed=config.seed, held_out=config.held_out)
        if not samples or not held_out:
            raise ConfigError(
                f"the corpus leaves {len(samples)} conversations to train on and {len(held_out)} held out: it needs"
                " more prompts, or another held_out",
                param="held_out",
            )
        draft_ids = frequent_ids(samples, target.config.vocab_size, config.draft_vocab_size)
        dtype = torch.bfloat16 if config.dtype == "bfloat16" else torch.float32
        self._teacher = Teacher.of(target, draft_ids, dtype=dtype, name=llm.model_name)
        torch.manual_seed(config.seed)
        self._trainee: Trainee = registry.trainee(method)(config, self._teacher)
        if config.start_from is not None:
            _take_over(self._trainee.parameters, read_checkpoint(config.start_from))
        if max(self._trainee.taps) > target.config.num_layers:
            raise ConfigError(
                f"taps is {self._trainee.taps}, expected layers from 0 to {target.config.num_layers}, which"
                f" {llm.model_name} has",
                param="taps",
            )
        layers = tuple(sorted({*self._trainee.taps, target.config.num_layers}))
        self.capture = Capture(target, samples, layers, places.states, shard_len=_SHARD_LEN)
        judges = _distinct(held_out)[: config.eval_prompts]
        self._prompts = [(sample.kind, sample.ids[: _prompt_len(sample)].tolist()) for sample in judges]
        lengths = [int(sample.is_response.sum()) for sample in samples]
        self._order = Order(
            lengths,
            shard_len=_SHARD_LEN,
            batch_tokens=config.batch_tokens,
            epochs=config.epochs,
            seed=config.seed,
        )
        self._optimizer = Optimizer(self._trainee.parameters, config)
        self.folder = RunFolder(places.run, self._description(samples))
        self._best = 0.0
        self._seen = 0
        self._last: tuple[int, Shard] | None = None

    @property
    def num_steps(self) -> int:
        """Optimiser steps of the whole run."""
        return self._order.num_steps

    def run(self) -> float:
        """Train from where the run stands to its end; the best mean acceptance length.

        Cost: about 180 MFLOP a response token for EAGLE-3 with SmolLM2's width and three steps. A run that is stopped
        (Ctrl-C) keeps its state as of the last measurement.
        """
        first = self._restore()
        began, seen = time.monotonic(), self._seen
        for number in range(first, self.num_steps):
            entry = self._step(number)
            self._log(entry)
            rate = (self._seen - seen) / (time.monotonic() - began)
            note = f"loss {entry['loss']:.3f}, {rate:.0f} tok/s, best MAL {self._best:.2f}"
            self._progress(f"training {self.method}", number + 1, self.num_steps, note)
            if (number + 1) % self.config.eval_every == 0 or number + 1 == self.num_steps:
                self._judge(number + 1)
        return self._best

    def _step(self, number: int) -> dict[str, Any]:
        step = self._order.step(number)
        mine = step.members[rank() :: world()]
        batch = batch_of(self._shard(step.shard), mine, self.capture.taps, self._teacher.dtype) if mine else None
        sums = torch.zeros(3)
        agreed, counted = torch.zeros(0), torch.zeros(0)
        if batch is not None:
            generator = torch.Generator().manual_seed(self.config.seed * 1_000_003 + number * 131 + rank())
            loss = self._trainee.loss(batch, generator)
            loss.total.backward()
            sums = torch.tensor([float(loss.total.detach()), loss.weight, float(batch.is_response.sum())])
            agreed, counted = loss.agreed, loss.counted
        add_up([sums, *self._gradients()])
        for gradient in self._gradients():
            gradient /= max(1.0, float(sums[1]))
        norm = self._optimizer.step(number / self.num_steps)
        self._seen += int(sums[2])
        return {
            "step": number + 1,
            "loss": float(sums[0]) / max(1.0, float(sums[1])),
            "gradient_norm": norm,
            "agreement": [round(float(a / c), 4) if c else None for a, c in zip(agreed, counted, strict=True)],
            "response_tokens": self._seen,
        }

    def _shard(self, index: int) -> Shard:
        """One shard; the steps of a shard follow each other, so the last one read is kept."""
        if self._last is None or self._last[0] != index:
            self._last = None  # two would not fit where one just does
            self._last = (index, self.capture.shard(index))
        return self._last[1]

    def _gradients(self) -> list[Tensor]:
        for parameter in self._trainee.parameters.values():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        return [parameter.grad for parameter in self._trainee.parameters.values() if parameter.grad is not None]

    def _judge(self, number: int) -> None:
        """Measure acceptance in the engine, keep the checkpoint if it is the best, and save the state."""
        if rank() == 0:
            entry = self._measured(number)
            self._log(entry)
            self.folder.save_state(
                {
                    "step": number,
                    "best": self._best,
                    "seen": self._seen,
                    "parameters": {name: p.detach() for name, p in self._trainee.parameters.items()},
                    "optimizer": self._optimizer.state(),
                }
            )
            if can_draw():
                draw(self.folder.entries(), self.folder.path / CURVE, self.method)
        wait()

    def _measured(self, number: int) -> dict[str, Any]:
        config = self.config
        folder = self.folder.write_candidate(*self._trainee.checkpoint())
        settings = {
            "method": self.method,
            "model": str(folder),
            "num_speculative_tokens": config.num_speculative_tokens,
        }
        served = measure(self._llm.sibling(settings), [ids for _, ids in self._prompts], config.eval_tokens)
        found = Acceptance.of(served)
        if found.mean_acceptance_length > self._best:
            self._best = found.mean_acceptance_length
            self.folder.promote(self._profile(number, served))
        return {"step": number, "response_tokens": self._seen} | _rounded(found)

    def _recorded(self, served: Sequence[RequestStats]) -> dict[str, Any]:
        """What was accepted, by workload: the kinds of the held-out conversations."""
        config, workloads = self.config, {}
        for kind in sorted({kind for kind, _ in self._prompts}):
            chosen = [index for index, (other, _) in enumerate(self._prompts) if other == kind]
            workloads[kind or "held_out"] = {
                "prompts": [self._prompts[index][1] for index in chosen],
                "max_tokens": config.eval_tokens,
                "num_speculative_tokens": config.num_speculative_tokens,
                "temperature": 0,
                "dtype": str(self._llm.dtype).removeprefix("torch."),
            } | _rounded(Acceptance.of(served[index] for index in chosen))
        return workloads

    def _profile(self, number: int, served: Sequence[RequestStats]) -> dict[str, Any]:
        """What the checkpoint is good for, and where it comes from."""
        target = self._llm.engine.model
        return {
            "target": {"name": self._llm.model_name, "fingerprint": fingerprint(target)},
            "method": self.method,
            "num_speculative_tokens": self.config.num_speculative_tokens,
            "acceptance": self._recorded(served),
            "provenance": {
                "step": number,
                "num_steps": self.num_steps,
                "response_tokens": self._seen,
                "corpus": self.capture.corpus_digest,
                "torch": torch.__version__.split("+")[0],
                "settings": self.config.as_json(),
            },
        }

    def _restore(self) -> int:
        state = self.folder.state()
        if rank() == 0:
            self.folder.rewind(0 if state is None else state["step"])
        if state is None:
            return 0
        with torch.no_grad():
            for name, parameter in self._trainee.parameters.items():
                parameter.copy_(state["parameters"][name])
        self._optimizer.restore(state["optimizer"])
        self._best, self._seen = state["best"], state["seen"]
        step: int = state["step"]
        return step

    def _log(self, entry: Mapping[str, Any]) -> None:
        if rank() == 0:
            self.folder.log(entry)

    def _description(self, samples: Sequence[Sample]) -> dict[str, Any]:
        return {
            "method": self.method,
            "target": fingerprint(self._llm.engine.model),
            "corpus": self.capture.corpus_digest,
            "responses": _marks_digest(samples),
            "draft_vocabulary": hashlib.sha256(self._teacher.draft_ids.numpy().tobytes()).hexdigest()[:16],
        } | self.config.as_json()


def _take_over(parameters: Mapping[str, torch.nn.Parameter], checkpoint: Checkpoint) -> None:
    """Copy the tensors that a checkpoint has of this network; the others (a further head's) stay fresh."""
    shared = {name: tensor for name, tensor in checkpoint.tensors.items() if name in parameters}
    if not shared:
        raise ConfigError(
            f"start_from: {checkpoint.source} has no tensor of this network: give a checkpoint of the same shape",
            param="start_from",
        )
    for name, tensor in shared.items():
        if tensor.shape != parameters[name].shape:
            raise ConfigError(
                f"start_from: {name} in {checkpoint.source} has shape {list(tensor.shape)}, this network's has"
                f" {list(parameters[name].shape)}: give the settings that it was trained with",
                param="start_from",
            )
        parameters[name].data.copy_(tensor)


def _rounded(found: Acceptance) -> dict[str, Any]:
    return {
        "mean_acceptance_length": round(found.mean_acceptance_length, 4),
        "per_position_acceptance": [round(rate, 4) for rate in found.per_position_acceptance],
    }


def frequent_ids(samples: Sequence[Sample], vocab_size: int, count: int) -> Tensor:
    """The most frequent response tokens [count] int64, ascending; ties go to the lower id."""
    counts = np.zeros(vocab_size, dtype=np.int64)
    for sample in samples:
        counts += np.bincount(sample.ids[sample.is_response], minlength=vocab_size)
    order = np.lexsort((np.arange(vocab_size), -counts))
    return torch.from_numpy(np.sort(order[: min(count, vocab_size)]))


def _marks_digest(samples: Sequence[Sample]) -> str:
    """Which tokens of which conversations are the target's own, as a short text."""
    digest = hashlib.sha256()
    for sample in samples:
        digest.update(f"{len(sample.ids)}".encode() + sample.is_response.tobytes())
    return digest.hexdigest()[:16]


def _prompt_len(sample: Sample) -> int:
    return int(np.argmax(sample.is_response))


def _distinct(samples: Sequence[Sample]) -> list[Sample]:
    """One conversation for each prompt."""
    return list({sample.prompt_key: sample for sample in samples}.values())

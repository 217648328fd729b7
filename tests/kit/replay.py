"""Replays a recorded run of another engine through ours, and gives every proposal that our drafter made in it.

Each recorded step says which rows the target ran, which drafts among them were verified, and what was committed. The
replay feeds exactly these rows to the runner and asks the drafter for a proposal where the recording has one; it checks
on the way that our target accepts and emits what was recorded. Blocks are handed out as the engine would.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from outrider.config import SpeculativeConfig
from outrider.drafting import registry
from outrider.drafting.base import DraftContext, Drafter, TargetInfo
from outrider.models.attention import Batch
from outrider.models.cache import BlockPool
from outrider.models.families import load_model
from outrider.models.memory import TargetMemory
from outrider.sampling import Purpose, RowGroup
from outrider.types import Proposal, SamplingParams
from tests.kit.source import ROOT

VECTORS = ROOT.parent / "shared" / "vectors"
NEAR_TIE = 1e-4
"""A recorded margin below this may fall either way in float32."""


@dataclass
class Recorded:
    """One recorded proposal beside ours."""

    name: str
    record: dict[str, Any]
    ours: tuple[int, ...]
    confidence: tuple[float, ...] | None

    @property
    def differs(self) -> bool:
        """Whether our drafts are others, and not by a near-tie at the first one that differs."""
        for mine, theirs, margin in zip(self.ours, self.record["drafts"], self.record["margin"], strict=True):
            if mine != theirs:
                return bool(margin >= NEAR_TIE)
        return False


@dataclass
class Replay:
    """One recorded case: its target, our drafter over it, and the blocks of its requests."""

    folder: Path
    target: TargetInfo
    drafter: Drafter
    num_tokens: int
    blocks: dict[str, list[int]] = field(default_factory=dict)

    @classmethod
    def open(cls, folder: Path, **changes: Any) -> Replay:
        """Load a case in float32; `changes` are further keys of the speculative config."""
        meta = json.loads((folder / "meta.json").read_text())
        size, max_len = meta["engine"]["block_size"], meta["engine"]["max_model_len"]
        model = load_model(str(folder / "target"), dtype=torch.float32, device=torch.device("cpu"), max_len=max_len)
        pool = BlockPool(8 * max_len // size, size)
        memory = TargetMemory(model, pool.num_blocks * size)
        for layer in memory.cache:
            layer.keys.fill_(float("nan"))
            layer.values.fill_(float("nan"))
        settings = meta["spec"] | changes
        if (folder / "drafter").is_dir():
            settings.setdefault("model", str(folder / "drafter"))
        config = SpeculativeConfig.parse(settings)
        target = TargetInfo(model, pool, memory, max_len)
        drafter = registry.create(config, target)
        memory.keep_taps(drafter.taps)
        for taps in memory.taps.values():
            taps.fill_(float("nan"))
        return cls(folder, target, drafter, config.num_speculative_tokens)

    def run(self) -> Iterator[Recorded]:
        """Every recorded proposal, with ours made from the same rows."""
        lines = [json.loads(line) for line in (self.folder / "steps.jsonl").read_text().splitlines()]
        for number in sorted({line["step"] for line in lines}):
            step = [line for line in lines if line["step"] == number]
            self._forward(step)
            proposal = self.drafter.propose(self._context(step))
            for index, line in enumerate(step):
                confidence = None if proposal.confidence is None else proposal.confidence[index]
                yield Recorded(f"{line['req']} at {number}", line, proposal.tokens[index], confidence)
            self._check_only(step, proposal)

    def _forward(self, step: list[dict[str, Any]]) -> None:
        """Run the recorded rows, and see that the target says what it said in the recording."""
        for line in step:
            self._cover(line["req"], line["row_start"] + len(line["row_ids"]) + self.num_tokens + 1)
        ids = np.concatenate([np.array(line["row_ids"], dtype=np.int64) for line in step])
        spans = [(line["row_start"], len(line["row_ids"])) for line in step]
        blocks = [self.blocks[line["req"]] for line in step]
        model, memory = self.target.model, self.target.memory
        batch = Batch.pack(ids, spans, blocks, np.arange(len(ids)), self.target.pool.block_size, model.device)
        result = model(batch, memory.cache, tuple(memory.taps))
        memory.record(batch.slots, result.taps)
        said = iter(result.logits.argmax(1).split([len(line["row_ids"]) for line in step]))
        for line in step:
            choices = next(said).tolist()[len(line["row_ids"]) - len(line["verified_drafts"]) - 1 :]
            if line["phase"] != "prompt_chunk":
                assert choices[: line["accepted"] + 1] == line["new_tokens"], line["req"]
                assert line["verified_drafts"][: line["accepted"]] == line["new_tokens"][:-1]

    def _cover(self, request: str, length: int) -> None:
        owned = self.blocks.setdefault(request, [])
        taken = self.target.pool.allocate(max(0, -(-length // self.target.pool.block_size) - len(owned)))
        assert taken is not None
        owned += taken

    def _context(self, step: list[dict[str, Any]]) -> DraftContext:
        histories = []
        for line in step:
            known = line["committed"][: line["last_valid_pos"] + 1]
            histories.append(np.array([*known, line["anchor"]], dtype=np.int64))
            self._cover(line["req"], len(known) + self.num_tokens + 1)
        params = SamplingParams(temperature=0.0)
        return DraftContext(
            slots=tuple(range(len(step))),
            histories=tuple(histories),
            blocks=tuple(self.blocks[line["req"]] for line in step),
            budgets=(self.num_tokens,) * len(step),
            groups=tuple(RowGroup(params, 0, 0, len(history)) for history in histories),
            sample_method="greedy",
            purpose=Purpose.GUMBEL,
        )

    def _check_only(self, step: list[dict[str, Any]], together: Proposal) -> None:
        """What was proposed for several requests at once is what each gets alone."""
        context = self._context(step)
        for index in range(len(step)):
            assert self.drafter.propose(context.only(index)).tokens[0] == together.tokens[index]

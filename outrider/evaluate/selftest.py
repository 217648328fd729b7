"""A loaded drafter must reach the acceptance that was recorded when it was made: a silent collapse becomes an error.

The record is `acceptance` in the drafter's speculation_profile.json: by workload, prompts as token ids, how far to go,
and the mean acceptance length that the trainer's engine measured. Wrong weights, a wrong target, a template that
changed, or a fault in a kernel all show here and nowhere in the text, which stays the target's own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from outrider.config import SpeculativeConfig
from outrider.drafting.profile import PROFILE
from outrider.errors import LoadError
from outrider.evaluate.acceptance import Acceptance, measure
from outrider.llm import LLM
from outrider.models.arch import read_json
from outrider.models.store import resolve

TOLERANCE = 0.03
"""Share of the recorded length that may be missing: another type or kernel decides near-ties differently."""


@dataclass(frozen=True, kw_only=True)
class SelfTest:
    """One workload: mean acceptance length as recorded and as measured now."""

    workload: str
    recorded: float
    measured: float
    num_prompts: int

    @property
    def passed(self) -> bool:
        """Whether it is reached, or surpassed."""
        return self.measured >= self.recorded * (1 - TOLERANCE)

    def as_json(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self) | {"passed": self.passed}


def self_test(plain: LLM, config: SpeculativeConfig) -> Iterator[SelfTest]:
    """Measure each recorded workload under its recorded conditions. Raises LoadError where nothing is recorded."""
    path = resolve(config.model or "") / PROFILE
    for name, entry in _recorded(path).items():
        try:
            prompts, max_tokens = entry["prompts"], int(entry["max_tokens"])
            length, recorded = int(entry["num_speculative_tokens"]), float(entry["mean_acceptance_length"])
        except (KeyError, TypeError, ValueError) as error:
            raise LoadError(f"{path}: acceptance of {name} is malformed ({error})") from error
        settings = {"method": config.method, "model": config.model, "num_speculative_tokens": length}
        found = Acceptance.of(measure(plain.sibling(settings), prompts, max_tokens))
        yield SelfTest(
            workload=name, recorded=recorded, measured=found.mean_acceptance_length, num_prompts=len(prompts)
        )


def _recorded(path: Path) -> Mapping[str, Any]:
    found = read_json(path).get("acceptance") if path.is_file() else None
    if not isinstance(found, Mapping) or not found:
        raise LoadError(f"{path} records no acceptance to reach, so there is nothing to test the drafter against")
    return found

"""`outrider models list` with drafters, and a command that leaves the drafter to the zoo."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.kit.command import Here
from tests.kit.zoo import install, profile, put_profile


@pytest.fixture
def drafter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of an installed drafter of two megabytes."""
    folder = put_profile(install(tmp_path) / "tiny" / "dspark", profile("aa", num_tokens=6)).resolve()
    (folder / "model.safetensors").write_bytes(bytes(2_000_000))
    monkeypatch.syspath_prepend(str(tmp_path))
    return folder


def test_installed_drafters_are_listed(here: Here, drafter: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "400")
    ended = here("models", "list")
    assert ended.code == 0
    (row,) = [line.split() for line in ended.out.splitlines() if "tiny/dspark" in line]
    assert row == ["tiny/dspark", "dspark", "tiny", "6", "2.0", str(drafter)]


def test_installed_drafters_are_in_the_json(here: Here, drafter: Path) -> None:
    records = json.loads(here("models", "list", "--json").out)
    (found,) = [record for record in records if record["name"] == "tiny/dspark"]
    assert found.pop("size_bytes") == sum(file.stat().st_size for file in drafter.iterdir())
    assert found == {
        "name": "tiny/dspark",
        "state": "ready",
        "path": str(drafter),
        "method": "dspark",
        "num_speculative_tokens": 6,
        "target": {"name": "tiny", "fingerprint": "aa"},
    }


@pytest.mark.real
@pytest.mark.parametrize("verb", ["generate", "bench", "check"])
def test_without_a_zoo_a_method_that_needs_one_is_one_clear_line(
    here: Here, smollm2: str, verb: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from outrider.drafting import zoo

    monkeypatch.setattr(zoo, "entry_points", lambda group: [])
    words = ["hi"] if verb == "generate" else ["--num-prompts", "1"]
    ended = here(verb, smollm2, *words, "--speculative-config", '{"method": "dspark"}')
    (line,) = ended.err.splitlines()
    assert ended.code == 2 and line.startswith("outrider: error: dspark needs a drafter")
    assert '"model"' in line and "outrider train dspark" in line


@pytest.mark.real
@pytest.mark.parametrize("verb", ["bench", "check"])
def test_what_was_left_out_is_stated_in_the_json(here: Here, smollm2: str, verb: str, tmp_path: Path) -> None:
    words = {"bench": ["--repeats", "1"], "check": ["--num-samples", "0"]}[verb]
    out = tmp_path / "out.json"
    drafting = ["--spec-model", smollm2, "--spec-tokens", "2"]
    ended = here(verb, smollm2, *drafting, "--num-prompts", "1", "--max-tokens", "4", *words, "--json", str(out))
    (run,) = json.loads(out.read_text(encoding="utf-8"))["runs"]
    assert ended.code == 0, ended.err
    assert {key: run["speculative_config"][key] for key in ("method", "model", "num_speculative_tokens")} == {
        "method": "draft_model",
        "model": "smollm2",
        "num_speculative_tokens": 2,
    }

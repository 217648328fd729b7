"""`outrider models inspect`: a table within 80 columns, the same as JSON, and one line for what is none of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from outrider.drafting.inspect import inspect
from tests.kit import block_checkpoints, eagle3, tiny
from tests.kit.command import Here, apart
from tests.kit.mtp import VARIANTS as MODULES


@pytest.fixture
def drafter(tmp_path: Path) -> Path:
    """A DSpark drafter with keys that nobody knows, and code of its own."""
    made = block_checkpoints.VARIANTS["dspark deepspec"]()
    made.config |= {"output_multiplier": [1, 2], "new_switch": None, "auto_map": {"AutoModel": "x.py"}}
    made.save(tmp_path / "drafter")
    return tmp_path / "drafter"


def test_the_table_says_what_it_is(here: Here, drafter: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    ended = here("models", "inspect", str(drafter))
    assert ended.code == 0 and ended.err == ""
    *lines, config = ended.out.splitlines()
    assert all(len(line) <= 80 for line in lines)
    rows = {line[: line.index("  ")]: " ".join(line.split("  ")[1:]).strip() for line in lines if line[0] != " "}
    assert rows["kind"] == "drafter" and rows["method"] == "dspark" and rows["format"] == "DeepSpec"
    assert rows["N"] == "7" and rows["taps"] == "0, 2, 4" and rows["mask token id"] == str(block_checkpoints.MASK)
    assert rows["target"] == "vocab size 64, hidden size 64, layers 4"
    assert rows["unknown keys"] == "output_multiplier = [1, 2]: may change the drafts"
    assert "new_switch = null: off, changes nothing" in ended.out
    assert rows["remote code"] == "auto_map in config.json: never run"
    assert "anchor layout: every row drafts" in ended.out and "confidence head" in ended.out
    assert config.startswith("--speculative-config '") and json.loads(config.split("'")[1]) == {
        "method": "dspark",
        "model": str(drafter),
        "num_speculative_tokens": 7,
    }


def test_json_is_the_same_as_data(here: Here, drafter: Path) -> None:
    ended = here("models", "inspect", str(drafter), "--json")
    assert ended.code == 0 and json.loads(ended.out) == inspect(str(drafter))


def test_a_target_with_its_module_and_one_that_cannot_be_read(here: Here, tmp_path: Path) -> None:
    made = MODULES["mimo"]()
    ended = here("models", "inspect", str(made.save(tmp_path / "target")))
    assert "MTP module inside" in ended.out and """'{"method": "mtp", "num_speculative_tokens": 1}'""" in ended.out
    made.config["quantization_config"] = {"quant_method": "awq", "bits": 4}
    ended = here("models", "inspect", str(made.save(tmp_path / "awq")))
    assert ended.code == 0 and "awq, 4 bit: cannot be read" in ended.out and "--speculative-config" not in ended.out


@pytest.mark.parametrize("damage", ["missing", "empty", "json", "cut", "gguf", "family"])
def test_bad_input_is_one_line(damage: str, here: Here, tmp_path: Path) -> None:
    path = tmp_path / "model"
    if damage == "empty":
        path.mkdir()
    elif damage not in ("missing", "gguf"):
        tiny.save_tiny(path)
    if damage == "json":
        (path / "config.json").write_text("{", encoding="utf-8")
    if damage == "cut":
        data = (path / "model.safetensors").read_bytes()
        (path / "model.safetensors").write_bytes(data[: len(data) // 2])
    if damage == "family":
        (path / "config.json").write_text('{"model_type": "nobodys", "auto_map": {}}', encoding="utf-8")
    if damage == "gguf":
        path = tmp_path / "model.gguf"
        path.write_bytes(b"GGUF\x03\x00\x00\x00\x01")
    ended = here("models", "inspect", str(path))
    (line,) = ended.err.splitlines()
    assert ended.code == 2 and ended.out == "" and line.startswith("outrider: error: ") and str(path) in line


def test_a_command_of_its_own(drafter: Path) -> None:
    ended = apart("models", "inspect", str(drafter))
    assert ended.code == 0 and "dspark" in ended.out and ended.err == ""


def test_loading_names_an_unknown_key_in_one_line(tmp_path: Path) -> None:
    """Without a handler of the user's, the line reaches stderr and nothing of stdout."""
    made = eagle3.VARIANTS["flat"]()
    made.config["residual_dropout_schedule"] = "cosine"
    made.save(tmp_path / "drafter")
    target = tiny.save_tiny(tmp_path / "target", 5, **eagle3.TARGET)
    words = ("--format", "speculators", "--target", str(target), "--output", str(tmp_path / "out"))
    ended = apart("export", str(tmp_path / "drafter"), *words)
    assert ended.code == 0 and ended.out.strip() == str(tmp_path / "out")
    (line,) = ended.err.splitlines()
    assert "residual_dropout_schedule = 'cosine', not known here" in line


@pytest.mark.real
def test_a_pulled_model_and_its_installed_drafters(here: Here, smollm2: str) -> None:
    found = json.loads(here("models", "inspect", smollm2, "--json").out)
    assert (found["kind"], found["family"], found["num_layers"]) == ("target", "llama", 30)
    for config in found["speculative_configs"]:
        name = f"smollm2/{config['method']}"
        drafter = json.loads(here("models", "inspect", name, "--json").out)
        assert drafter["method"] == config["method"] and drafter["target"]["name"] == "smollm2"
        assert drafter["unknown_keys"] == [] and drafter["runs_on"] == "own code"

"""Keys of a config.json that nobody reads are named once, with what they may change; those that are read never are."""

from __future__ import annotations

import json
import logging
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from outrider.drafting import registry, zoo
from outrider.drafting.known_keys import BLOCK, EAGLE, GEMMA4_DRAFTER, MODULE
from outrider.models.arch import read_json
from outrider.models.families import load_model
from outrider.models.unknown_keys import GEMMA, HARMLESS, LAYERS, target_keys, unknown_keys
from tests.kit import block_checkpoints, eagle3, gemma, gemma4_mtp, tiny
from tests.kit.mtp import VARIANTS as MODULES
from tests.kit.source import PACKAGE

DRAFTERS: dict[str, dict[str, Any]] = {
    **{f"eagle3 {name}": {"method": "eagle3", "made": make} for name, make in eagle3.VARIANTS.items()},
    **{name: {"method": name.split()[0], "made": make} for name, make in block_checkpoints.VARIANTS.items()},
    **{f"gemma4_mtp {name}": {"method": "gemma4_mtp", "made": make} for name, make in gemma4_mtp.VARIANTS.items()},
    **{f"mtp {name}": {"method": "mtp", "made": make} for name, make in MODULES.items()},
}
# What readers look for inside rope_scaling, rope_parameters, quantization_config and generation_config.json.
INNER = {"factor", "rope_type", "type", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"}
INNER |= {"quant_method", "suppress_tokens", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "weight_block_size"}
READS = re.compile(r'\.(?:get|count|number|flag|optional_flag|text|table)\(\s*"([a-z0-9_]+)"')
READERS = ("drafting/config_keys.py", "drafting/block_config.py", "drafting/gemma4_config.py", "drafting/latent.py")
LEAVES = ("eagle3", "dflash", "dspark", "gemma4_mtp")


@pytest.fixture(autouse=True)
def heard(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.WARNING)
    return caplog


@pytest.mark.parametrize("name", DRAFTERS)
def test_every_published_format_is_known(name: str) -> None:
    raw = DRAFTERS[name]["made"]().config
    known = registry.known_keys(DRAFTERS[name]["method"], raw)
    assert known and [str(key) for key in unknown_keys(raw, known) if not key.is_off] == []


def test_installed_drafters_are_known() -> None:
    for drafter in zoo.drafters():
        raw = read_json(drafter.path / "config.json")
        assert unknown_keys(raw, registry.known_keys(drafter.profile.method, raw)) == []


def test_every_key_that_some_reader_asks_for_is_known() -> None:
    """A new key in a reader must not be told of as unknown."""
    files = [*READERS, *(f"drafters/{name}.py" for name in LEAVES), "models/arch.py", "models/gemma_config.py"]
    asked = {key for file in files for key in READS.findall((PACKAGE / file).read_text(encoding="utf-8"))}
    assert len(asked) > 60
    assert asked - INNER - LAYERS - GEMMA - EAGLE - BLOCK - GEMMA4_DRAFTER - MODULE - HARMLESS == set()


@pytest.mark.parametrize(
    "name", ["gemma3_text", "gemma4_text", "gemma3", "gemma4", "llama", "mistral", "qwen2", "qwen3", "qwen3_5"]
)
def test_what_transformers_writes_for_a_family_is_known(name: str) -> None:
    transformers = pytest.importorskip("transformers")
    raw = transformers.CONFIG_MAPPING[name]().to_dict()
    assert [str(key) for key in unknown_keys(raw, target_keys(raw)) if not key.is_off] == []


# ---- what is said ----


def test_loading_a_drafter_names_an_unknown_key_once(heard: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    made, model = block_checkpoints.VARIANTS["dflash zlab"](), tiny.tiny_model(5, **block_checkpoints.TARGET)
    made.config["output_multiplier"] = 2.0
    made.config["dflash_config"] |= {"conv_kernel_size": 3, "sinks": False, "more": None}
    settings = made.save(tmp_path) | {"num_speculative_tokens": 3}
    for _ in range(2):
        tiny.make_engine(model, speculative=settings)
    (record,) = [record for record in heard.records if str(tmp_path) in record.getMessage()]
    line = record.getMessage()
    assert "output_multiplier = 2.0" in line and "dflash_config.conv_kernel_size = 3" in line
    assert "sinks" not in line and "more" not in line and "\n" not in line
    assert line.endswith("not known here: drafts may be worse for it, the text stays the target's")


def test_loading_a_target_names_an_unknown_key(heard: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    folder = tiny.save_tiny(tmp_path)
    raw = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    raw |= {"residual_multiplier": 0.5, "auto_map": {"AutoModel": "x.py"}, "use_cache": True, "logits_scaling": None}
    (folder / "config.json").write_text(json.dumps(raw), encoding="utf-8")
    load_model(str(folder), dtype=torch.float32, device=torch.device("cpu"))
    (line,) = [record.getMessage() for record in heard.records if str(tmp_path) in record.getMessage()]
    assert "residual_multiplier = 0.5, not known here: its text may be another than intended" in line
    assert "auto_map" not in line and "logits_scaling" not in line


def test_a_known_target_and_drafter_say_nothing(heard: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    made = MODULES["qwen"]()
    model = made.load(tmp_path / "target")
    tiny.make_engine(model, speculative={"method": "mtp", "num_speculative_tokens": 2})
    gemma.save_gemma(tmp_path / "gemma", "gemma4")
    load_model(str(tmp_path / "gemma"), dtype=torch.float32, device=torch.device("cpu"))
    assert heard.records == []


def test_a_key_that_is_off_asks_for_nothing() -> None:
    raw = {"a": None, "b": False, "c": [], "d": {}, "e": "", "f": 0, "text_config": {"g": 1, "hidden_size": 4}}
    found = unknown_keys(raw, LAYERS)
    assert [key.key for key in found] == ["a", "b", "c", "d", "e", "f", "text_config.g"]
    assert [key.key for key in found if not key.is_off] == ["f", "text_config.g"]
    (long,) = unknown_keys({"list": list(range(99))}, LAYERS)
    assert len(str(long)) < 60 and str(long).endswith("…")

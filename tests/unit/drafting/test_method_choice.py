"""Which method a checkpoint is for: what is said first counts first, and no folder's name ever counts.

In order: the configuration's method, the Speculators format's key, the model's type, the classes, names and shapes of
the tensors.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from outrider.config import SpeculativeConfig
from outrider.drafting import registry
from outrider.drafting.checkpoint import method_of, own_method, read_checkpoint
from outrider.engine.engine import Engine
from outrider.errors import ConfigError, DrafterMismatch, LoadError, OutriderError
from outrider.models.llama import LlamaModel
from tests.kit import block_checkpoints, eagle3, gemma4_mtp, tiny
from tests.kit.mtp import VARIANTS as MODULES

BLOCK = block_checkpoints.VARIANTS
MISLEADING = ("eagle3-dflash-dspark-mtp", "dflash_qwen3_4b_block7", "gemma-4-assistant", "draft_model")


@pytest.fixture(scope="module")
def target() -> LlamaModel:
    return tiny.tiny_model(5, **eagle3.TARGET)


def restated(folder: Path, config: dict[str, Any]) -> str:
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return str(folder)


def found(folder: Path | str) -> str | None:
    return method_of(read_checkpoint(str(folder)))


def refused(kind: type[OutriderError], target: LlamaModel, **settings: Any) -> str:
    with pytest.raises(kind) as caught:
        config = registry.resolve(SpeculativeConfig.parse(settings), target)
        tiny.make_engine(target, speculative=config)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# ---- names ----


@pytest.mark.parametrize("name", MISLEADING)
def test_a_folders_name_says_nothing(name: str, tmp_path: Path) -> None:
    folder = tmp_path / "dspark" / name
    for method, save in {
        "eagle3": lambda: eagle3.VARIANTS["flat"]().save(folder),
        "dflash": lambda: BLOCK["dflash zlab"]().save(folder),
        "dspark": lambda: BLOCK["dspark deepspec"]().save(folder),
        "mtp": lambda: MODULES["qwen"]().save_delta(folder),
        None: lambda: tiny.save_tiny(folder),
    }.items():
        save()
        assert found(folder) == method


def test_an_explicit_method_wins_over_names_and_marks(target: LlamaModel, tmp_path: Path) -> None:
    for method in ("dflash", "eagle3", "mtp"):
        folder = str(tiny.save_tiny(tmp_path / "dspark-eagle3"))
        config = SpeculativeConfig.parse({"method": method, "model": folder, "num_speculative_tokens": 2})
        assert registry.resolve(config, target).method == method


# ---- what a file says of itself ----


@pytest.mark.parametrize(
    ("config", "method"),
    [
        ({"speculators_model_type": "eagle3", "architectures": ["DFlashDraftModel"]}, "eagle3"),
        ({"speculators_model_type": "peagle", "model_type": "gemma4_assistant"}, "eagle3"),
        ({"speculators_model_type": "dflash2"}, "dflash2"),
        ({"speculators_config": {}, "architectures": ["LlamaForCausalLMEagle3"]}, None),
        ({"model_type": "gemma4_assistant", "architectures": ["DFlashDraftModel"]}, "gemma4_mtp"),
        ({"model_type": "gemma4_unified_assistant"}, "gemma4_mtp"),
        ({"model_type": "gemma4_text"}, "dspark"),
        ({"model_type": "qwen3_next_mtp"}, "mtp"),
        ({"model_type": "medusa"}, "medusa"),
        ({"architectures": ["LlamaForCausalLMEagle3"]}, "eagle3"),
        ({"architectures": ["Eagle3Qwen3ForCausalLM"]}, "eagle3"),
        ({"architectures": ["PeagleLlamaForCausalLM"]}, "eagle3"),
        ({"architectures": ["DFlashDraftModel"]}, "dflash"),
        ({"architectures": ["DFlash2DraftModel"]}, "dflash2"),
        ({"architectures": ["DSparkDraftModel"], "model_type": "qwen3"}, "dspark"),
        ({"architectures": ["Gemma4DSparkModel"]}, "dspark"),
        ({"architectures": ["LlamaForCausalLM"]}, "dspark"),
        ({"architectures": None}, "dspark"),
        ({}, "dspark"),
    ],
    ids=str,
)
def test_what_is_said_first_counts_first(config: dict[str, Any], method: str | None, tmp_path: Path) -> None:
    """The tensors are DSpark's throughout, and count where nothing else speaks."""
    BLOCK["dspark deepspec"]().save(tmp_path)
    assert found(restated(tmp_path, config)) == method


def test_shapes_tell_eagle3_from_a_block_drafter(tmp_path: Path) -> None:
    for name, made in {"flat": eagle3.VARIANTS["flat"](), "layers.0": eagle3.VARIANTS["speculators"]()}.items():
        made.save(tmp_path / name)
        assert found(restated(tmp_path / name, {"model_type": "llama"})) == "eagle3"
    BLOCK["dflash zlab"]().save(tmp_path / "block")
    assert found(restated(tmp_path / "block", {"model_type": "qwen3"})) == "dflash"
    MODULES["mimo"]().save_delta(tmp_path / "module")
    assert found(restated(tmp_path / "module", {})) == "mtp"
    gemma4_mtp.VARIANTS[next(iter(gemma4_mtp.VARIANTS))]().save(tmp_path / "assistant")
    assert found(restated(tmp_path / "assistant", {"model_type": "llama"})) == "gemma4_mtp"


def test_a_deepspec_dflash_is_a_dspark_network_without_correction(tmp_path: Path) -> None:
    """Either method runs it and proposes the same; without a method it is taken for DFlash, as its makers call it."""
    folder = tmp_path / "dflash_qwen3_4b_block7"
    BLOCK["dflash deepspec"]().save(folder)
    model = tiny.tiny_model(5, **block_checkpoints.TARGET)
    chains = []
    for method in ("dflash", "dspark"):
        keys = {"method": method, "model": str(folder), "num_speculative_tokens": 7}
        chains.append(first_drafts(tiny.make_engine(model, speculative=keys)))
    assert found(folder) == "dflash" and chains[0] == chains[1] and len(set(chains[0])) > 2


def first_drafts(engine: Engine) -> tuple[int, ...]:
    assert engine.drafter is not None
    seen: list[tuple[int, ...]] = []
    propose = engine.drafter.propose

    def kept(context: Any) -> Any:
        proposal = propose(context)
        seen.append(tuple(proposal.tokens[0]))
        return proposal

    engine.drafter.propose = kept  # type: ignore[method-assign]
    tiny.run(engine, [tiny.make_request("r", tiny.random_prompt(0, 9), max_tokens=10)])
    return seen[0]


# ---- names that vLLM has ----


@pytest.mark.parametrize("alias", ["qwen3_next_mtp", "qwen3_5_mtp", "deepseek_mtp", "mimo_mtp", "glm4_moe_mtp", "mtp"])
def test_vllms_aliases_mean_mtp(alias: str, tmp_path: Path) -> None:
    made = MODULES["qwen"]()
    model = made.load(tmp_path)
    config = registry.resolve(SpeculativeConfig.parse({"method": alias, "num_speculative_tokens": 3}), model)
    assert (config.method, config.num_speculative_tokens, config.model) == ("mtp", 3, str(tmp_path))
    assert tiny.make_engine(model, speculative={"method": alias, "num_speculative_tokens": 3}).drafter is not None


def test_mtp_with_a_gemma_4_drafter_is_that_drafters_own_method(tmp_path: Path) -> None:
    folder = tmp_path / "some-dflash"
    gemma4_mtp.VARIANTS[next(iter(gemma4_mtp.VARIANTS))]().save(folder)
    for alias in ("mtp", "gemma4_mtp", "qwen3_5_mtp"):
        assert own_method(alias, str(folder)) == "gemma4_mtp"
    module = MODULES["qwen"]().save_delta(tmp_path / "gemma4-assistant")
    assert own_method("mtp", str(module)) == "mtp" and own_method("mtp", None) == "mtp"
    assert own_method("eagle3", "no/such/folder") == "eagle3"


def test_a_method_that_is_none_is_still_refused(target: LlamaModel) -> None:
    said = refused(ConfigError, target, method="eagle4", model="x", num_speculative_tokens=2)
    assert "did you mean eagle3?" in said


# ---- one line each ----


def test_a_target_without_a_module_is_refused(target: LlamaModel) -> None:
    for method in ("mtp", "qwen3_next_mtp"):
        assert "no multi-token prediction module" in refused(DrafterMismatch, target, method=method)


def test_parallel_eagle_is_known_and_refused(target: LlamaModel, tmp_path: Path) -> None:
    made = eagle3.VARIANTS["speculators"]()
    made.config |= {"speculators_model_type": "peagle", "mask_token_id": 1}
    made.save(tmp_path)
    assert "parallel drafting" in refused(LoadError, target, model=str(tmp_path), num_speculative_tokens=2)
    made.config = eagle3.VARIANTS["flat"]().config | {"architectures": ["PeagleLlamaForCausalLM"]}
    made.save(tmp_path)
    assert "PeagleLlamaForCausalLM" in refused(LoadError, target, model=str(tmp_path), num_speculative_tokens=2)


@pytest.mark.parametrize(
    ("table", "scheme"),
    [
        ({"quant_method": "fp8", "fmt": "e4m3"}, "(fp8, e4m3)"),
        ({"quant_method": "compressed-tensors", "format": "pack-quantized"}, "(compressed-tensors, pack-quantized)"),
        ({"quant_method": "gptq", "bits": 4}, "(gptq, 4 bit)"),
    ],
)
@pytest.mark.parametrize("method", ["eagle3", None])
def test_a_quantised_drafter_is_refused_by_its_scheme(
    method: str | None, table: dict[str, Any], scheme: str, target: LlamaModel, tmp_path: Path
) -> None:
    made = eagle3.VARIANTS["flat"]()
    made.config["quantization_config"] = table
    made.save(tmp_path)
    said = refused(
        LoadError, target, model=str(tmp_path), num_speculative_tokens=2, **({"method": method} if method else {})
    )
    assert f"the weights are quantised {scheme}, which cannot be read" in said


def test_modelopts_own_file_is_read_for_the_scheme(target: LlamaModel, tmp_path: Path) -> None:
    eagle3.VARIANTS["flat"]().save(tmp_path)
    (tmp_path / "hf_quant_config.json").write_text('{"quantization": {"quant_algo": "NVFP4"}}', encoding="utf-8")
    said = refused(LoadError, target, model=str(tmp_path), num_speculative_tokens=2)
    assert "(modelopt, NVFP4)" in said

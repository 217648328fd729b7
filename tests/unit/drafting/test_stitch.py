"""A module stitched into its target: it drafts as from its own folder, nothing else of the target changes, and a write
that is broken off leaves nothing.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from outrider.config import SpeculativeConfig
from outrider.drafting import registry
from outrider.drafting import stitch as stitching
from outrider.drafting.checkpoint import read_checkpoint
from outrider.drafting.inspect import inspect
from outrider.errors import CapacityError, ConfigError, DrafterMismatch, LoadError
from outrider.models.families import load_model
from outrider.models.headers import INDEX
from outrider.models.llama import LlamaModel
from outrider.models.loading import load_tensors
from outrider.train import export as exporting
from outrider.train.export import stitch
from tests.kit import tiny
from tests.kit.mtp import QWEN, VARIANTS, Made
from tests.kit.zoo import profile, put_profile


def bare(made: Made, folder: Path) -> str:
    """The target's folder without its module and without the key that would count it."""
    config = {key: value for key, value in made.config.items() if "nextn" not in key and not key.startswith("mtp")}
    return str(Made(config, made.target, {}, made.meaning).save(folder))


def in_speculators(made: Made, folder: Path, **more: Tensor) -> str:
    """The module of Qwen's layout as a fine-tuning run of Speculators leaves it."""
    names = {
        "mtp.fc.": "input_proj.",
        "mtp.pre_fc_norm_embedding.": "token_layernorm.",
        "mtp.pre_fc_norm_hidden.": "hidden_layernorm.",
        "mtp.norm.": "final_layernorm.",
        "mtp.layers.0.": "",
    }
    tensors = dict(more)
    for name, tensor in made.module.items():
        old, new = next(pair for pair in names.items() if name.startswith(pair[0]))
        tensors["mtp_layers.0." + new + name.removeprefix(old)] = tensor
    config = {"speculators_model_type": "mtp", "speculators_config": {}, "transformer_layer_config": made.config}
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    save_file(tensors, folder / "model.safetensors")
    return str(folder)


def loaded(folder: Path | str) -> LlamaModel:
    return load_model(str(folder), dtype=torch.float32, device=torch.device("cpu"))


def drafts(target: LlamaModel, **more: Any) -> list[tuple[int, ...]]:
    """Every chain of a run, in order."""
    engine = tiny.make_engine(target, speculative={"method": "mtp", "num_speculative_tokens": 6} | more)
    assert engine.drafter is not None
    seen: list[tuple[int, ...]] = []
    propose = engine.drafter.propose

    def kept(context: Any) -> Any:
        proposal = propose(context)
        seen.extend(tuple(chain) for chain in proposal.tokens)
        return proposal

    engine.drafter.propose = kept  # type: ignore[method-assign]
    tiny.run(engine, [tiny.make_request(f"r{i}", tiny.random_prompt(i, 9 + i), max_tokens=14) for i in range(3)])
    return seen


@pytest.mark.parametrize("name", VARIANTS)
def test_a_stitched_module_drafts_as_from_its_own_folder(name: str, tmp_path: Path) -> None:
    made = VARIANTS[name]()
    target, module = bare(made, tmp_path / "target"), str(made.save_delta(tmp_path / "module"))
    out = stitch(module, target=target, output=tmp_path / "out")
    expected = drafts(loaded(target), model=module)
    assert len({token for chain in expected for token in chain}) > 5
    assert drafts(loaded(out)) == expected
    found = inspect(str(out))
    assert found["kind"] == "target" and found["mtp_module"] is not None
    assert inspect(target)["mtp_module"] is None


@pytest.mark.parametrize("name", ["qwen", "qwen3", "sliding"])
def test_a_module_of_speculators_drafts_as_the_one_that_it_was_trained_from(name: str, tmp_path: Path) -> None:
    made = VARIANTS[name]()
    target = bare(made, tmp_path / "target")
    frozen = {"embed_tokens.weight": made.target["model.embed_tokens.weight"]}
    module = in_speculators(made, tmp_path / "module", **frozen)
    assert "outrider export" in inspect(module)["why_not"]
    out = stitch(module, target=target, output=tmp_path / "out")
    assert drafts(loaded(out)) == drafts(loaded(target), model=str(made.save_delta(tmp_path / "delta")))
    assert {name for name in load_tensors(out) if "mtp" in name} == made.module.keys()


def test_a_fine_tuned_module_takes_the_place_of_the_targets_own(tmp_path: Path) -> None:
    old, new = VARIANTS["qwen"](), VARIANTS["qwen"]()
    new.module = {name: tensor + 0.25 for name, tensor in old.module.items()}
    target = str(old.save(tmp_path / "target"))
    out = stitch(in_speculators(new, tmp_path / "module"), target=target, output=tmp_path / "out")
    tensors = load_tensors(out)
    assert tensors.keys() == load_tensors(Path(target)).keys()
    for name, tensor in {**old.target, **new.module}.items():
        assert torch.equal(tensors[name], tensor), name
    stored = [name for file in out.glob("*.safetensors") for name in load_file(file)]
    assert len(stored) == len(set(stored)), "no reader may find the old module beside the new one"


def test_every_other_byte_of_the_target_stays(tmp_path: Path) -> None:
    made = VARIANTS["qwen"]()
    made.target = {name: tensor.bfloat16() for name, tensor in made.target.items()}
    target = Path(bare(made, tmp_path / "target"))
    for name, text in {"tokenizer.json": "{}", "LICENSE": "free", "outrider.json": "{}", "old.bin": "x"}.items():
        (target / name).write_text(text, encoding="utf-8")
    module = put_profile(made.save_delta(tmp_path / "module"), profile("aa", "mtp", 3))
    out = stitch(str(module), target=str(target), output=tmp_path / "out")
    assert sorted(path.name for path in out.iterdir()) == [
        "LICENSE",
        "config.json",
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
        INDEX,
        "speculation_profile.json",
        "tokenizer.json",
    ]
    for name, tensor in load_file(target / "model.safetensors").items():
        found = load_tensors(out)[name]
        assert found.dtype == torch.bfloat16 and torch.equal(found, tensor)
    config = json.loads((out / "config.json").read_text(encoding="utf-8"))
    assert config == json.loads((target / "config.json").read_text(encoding="utf-8")) | {"mtp_num_hidden_layers": 1}
    # The module's profile says how far to draft, now for the target's own folder.
    found = registry.resolve(SpeculativeConfig.parse({"method": "mtp"}), loaded(out))
    assert (found.num_speculative_tokens, found.model) == (3, str(out))


def test_shards_stay_shards(tmp_path: Path) -> None:
    made = VARIANTS["qwen"]()
    target = Path(bare(made, tmp_path / "target"))
    first = stitch(str(made.save_delta(tmp_path / "module")), target=str(target), output=tmp_path / "first")
    second = stitch(str(tmp_path / "module"), target=str(first), output=tmp_path / "second")
    assert {path.name: path.read_bytes() for path in first.iterdir()} == {
        path.name: path.read_bytes() for path in second.iterdir()
    }


def test_the_key_is_set_where_the_target_has_it(tmp_path: Path) -> None:
    made = VARIANTS["qwen"]()
    module, config = made.save_delta(tmp_path / "module"), made.config | {"mtp_num_hidden_layers": 0}
    target = Made(config, made.target, {}, QWEN).save(tmp_path / "flat")
    out = stitch(str(module), target=str(target), output=tmp_path / "a")
    assert read_checkpoint(str(out)).config["mtp_num_hidden_layers"] == 1
    nested = {"model_type": "qwen3_5", "text_config": config | {"model_type": "qwen3_5_text"}}
    target = Made(nested, made.target, {}, QWEN).save(tmp_path / "nested")
    out = stitch(str(module), target=str(target), output=tmp_path / "b")
    config = read_checkpoint(str(out)).config
    assert config["text_config"]["mtp_num_hidden_layers"] == 1 and "mtp_num_hidden_layers" not in config


@pytest.mark.parametrize("spelt", ["one by one", "in one"])
def test_experts_are_spelt_as_the_targets(spelt: str, tmp_path: Path) -> None:
    made = VARIANTS["qwen"]()
    gate_up, down = torch.randn(3, 10, 4), torch.randn(3, 4, 5)
    if spelt == "in one":
        made.target["model.layers.0.mlp.experts.gate_up_proj"] = torch.zeros(1, 2, 2)
    target, prefix = bare(made, tmp_path / "target"), "mtp_layers.0.mlp.experts."
    more = {prefix + "gate_up_proj": gate_up, prefix + "down_proj": down}
    tensors = load_tensors(stitch(in_speculators(made, tmp_path / "m", **more), target=target, output=tmp_path / "out"))
    found = {name.removeprefix("mtp.layers.0.mlp.experts."): t for name, t in tensors.items() if "mtp" in name}
    if spelt == "in one":
        assert torch.equal(found["gate_up_proj"], gate_up) and torch.equal(found["down_proj"], down)
        return
    for index in range(3):
        gate, up = gate_up[index].chunk(2)
        assert torch.equal(found[f"{index}.gate_proj.weight"], gate)
        assert torch.equal(found[f"{index}.up_proj.weight"], up)
        assert torch.equal(found[f"{index}.down_proj.weight"], down[index])
    assert "gate_up_proj" not in found


# ---- what is refused ----


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"vocab_size": 80}, "vocab_size 64, the target 80"),
        ({"hidden_size": 96}, "hidden_size 64, the target 96"),
        ({"rope_theta": 500.0}, "rope_theta 10000.0, the target 500.0"),
        ({"num_hidden_layers": 4}, "num_layers 3, the target 4"),
    ],
)
def test_another_target_is_refused(changes: dict[str, Any], said: str, tmp_path: Path) -> None:
    made = VARIANTS["qwen"]()
    module = str(made.save_delta(tmp_path / "module"))
    made.config |= changes
    with pytest.raises(DrafterMismatch, match=said) as caught:
        stitch(module, target=bare(made, tmp_path / "target"), output=tmp_path / "out")
    assert "\n" not in str(caught.value) and not (tmp_path / "out").exists()


@pytest.mark.parametrize("layouts", [("qwen", "mimo"), ("mimo", "qwen")])
def test_a_module_in_another_layout_than_the_targets_is_refused(layouts: tuple[str, str], tmp_path: Path) -> None:
    made, other = (VARIANTS[name]() for name in layouts)
    target = Made(made.config, made.target, other.module, other.meaning).save(tmp_path / "target")
    with pytest.raises(DrafterMismatch, match="another layout"):
        stitch(str(made.save_delta(tmp_path / "module")), target=str(target), output=tmp_path / "out")


def test_what_is_no_module_is_refused(tmp_path: Path) -> None:
    made = VARIANTS["qwen"]()
    target = bare(made, tmp_path / "target")
    with pytest.raises(DrafterMismatch, match="holds no multi-token prediction module"):
        stitch(target, target=target, output=tmp_path / "out")
    whole = str(made.save(tmp_path / "whole"))
    with pytest.raises(DrafterMismatch, match="beside its module: expected a module apart"):
        stitch(whole, target=target, output=tmp_path / "out")
    made.module["mtp.fc.weight"] = made.module["mtp.fc.weight"][:, 1:].contiguous()
    with pytest.raises(DrafterMismatch, match=r"mtp\.fc\.weight of shape \[64, 127\], expected \[64, 128\]"):
        stitch(str(made.save_delta(tmp_path / "cut")), target=target, output=tmp_path / "out")


def test_a_quantised_target_is_refused_by_its_scheme(tmp_path: Path) -> None:
    made = VARIANTS["qwen"]()
    module = str(made.save_delta(tmp_path / "module"))
    made.config["quantization_config"] = {"quant_method": "gptq", "bits": 4}
    with pytest.raises(LoadError, match=r"quantised \(gptq, 4 bit\)"):
        stitch(module, target=bare(made, tmp_path / "target"), output=tmp_path / "out")


def test_too_little_room_is_said_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = VARIANTS["qwen"]()
    target, module = bare(made, tmp_path / "target"), str(made.save_delta(tmp_path / "module"))
    usage = shutil.disk_usage(tmp_path)._replace(free=1_000_000)
    monkeypatch.setattr(exporting.shutil, "disk_usage", lambda path: usage)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(CapacityError, match="takes 1 MB, 1 MB are free there") as caught:
        stitch(module, target=target, output=tmp_path / "out")
    assert caught.value.param == "output" and sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize(
    ("fault", "raised"),
    [(KeyboardInterrupt(), KeyboardInterrupt), (OSError(28, "No space left on device"), CapacityError)],
    ids=["Ctrl-C", "full disk"],
)
def test_nothing_half_is_left(
    fault: BaseException, raised: type[BaseException], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = VARIANTS["qwen"]()
    target, module = bare(made, tmp_path / "target"), str(made.save_delta(tmp_path / "module"))
    before = sorted(tmp_path.rglob("*"))
    copies: list[int] = []

    def stops(source: Any, out: Any, num_bytes: int) -> None:
        copies.append(out.write(b"half"))
        if len(copies) == 5:
            raise fault

    monkeypatch.setattr(stitching, "_copy", stops)
    with pytest.raises(raised):
        stitch(module, target=target, output=tmp_path / "out")
    assert len(copies) == 5 and sorted(tmp_path.rglob("*")) == before


def test_a_folder_with_something_in_it_is_not_touched(tmp_path: Path) -> None:
    made = VARIANTS["qwen"]()
    target, module = bare(made, tmp_path / "target"), str(made.save_delta(tmp_path / "module"))
    with pytest.raises(ConfigError, match="is there already"):
        stitch(module, target=target, output=Path(target))

"""Exported drafters: every format that can hold a checkpoint gives the same drafts, and every other one is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from outrider.drafting.checkpoint import method_of, read_checkpoint
from outrider.errors import ConfigError
from outrider.models.llama import LlamaModel
from outrider.train.export import FORMATS, export
from tests.kit import block_checkpoints, eagle3, tiny
from tests.kit.exported import VARIANTS, Find, Make, content, convert

# For every variant what refuses it, by format; formats of other methods are refused by name.
EAGLE3, DFLASH, DSPARK = ("speculators", "eagle", "deepspec"), ("speculators", "z-lab", "deepspec"), FORMATS[::3]
FORMATS_OF = {"eagle3": EAGLE3, "dflash": DFLASH, "dspark": DSPARK}
REFUSED: dict[str, dict[str, str]] = {
    "eagle3 flat": {"deepspec": "model_type"},
    "eagle3 flat normed": {"deepspec": "model_type"},
    "eagle3 norm before fc": {"deepspec": "model_type"},
    "eagle3 3.1": {"deepspec": "model_type"},
    "eagle3 3.1 flat": {"deepspec": "model_type"},
    "eagle3 speculators": {"deepspec": "model_type"},
    "eagle3 qwen3": {"eagle": "model_type", "deepspec": "draft_vocab_size"},
    "eagle3 sliding": {"deepspec": "model_type"},
    "eagle3 deepspec": {"eagle": "model_type"},
    "eagle3 two layers": {"eagle": "num_hidden_layers", "deepspec": "model_type"},
    "eagle3 biased": {"deepspec": "model_type"},
    "eagle3 wide": {"deepspec": "model_type"},
    "eagle3 last state": {"speculators": "use_aux_hidden_state", "deepspec": "model_type"},
    "eagle3 small heads": {"deepspec": "model_type"},
    "eagle3 own choice of taps": {"deepspec": "model_type"},
    "eagle3 latent": dict.fromkeys(("speculators", "eagle", "deepspec"), "kv_lora_rank"),
    "eagle3 latent, plain": dict.fromkeys(("speculators", "eagle", "deepspec"), "kv_lora_rank"),
    "eagle3 other rope": {"deepspec": "model_type"},
    "dflash zlab": {"deepspec": "sample_from_anchor"},
    "dflash causal": {"deepspec": "sample_from_anchor"},
    "dflash is_causal": {"deepspec": "sample_from_anchor"},
    "dflash sliding": {"deepspec": "sample_from_anchor"},
    "dflash mixed": {"speculators": "causality of layers", "deepspec": "sample_from_anchor"},
    "dflash sliding both ways": {"deepspec": "sample_from_anchor"},
    "dflash use_swa": {"deepspec": "sample_from_anchor"},
    "dflash speculators": {"z-lab": "draft_vocab_size", "deepspec": "sample_from_anchor"},
    "dflash speculators causal": {"z-lab": "draft_vocab_size", "deepspec": "sample_from_anchor"},
    "dflash wide": {"z-lab": "target_hidden_size", "deepspec": "sample_from_anchor"},
    "dflash biased": {"deepspec": "sample_from_anchor"},
    "dflash deepspec": {"z-lab": "sample_from_anchor"},
    "dflash small heads": {"deepspec": "sample_from_anchor"},
    "dflash other rope": {"deepspec": "sample_from_anchor"},
    "dspark deepspec": {},
    "dspark gated": {},
    "dspark rnn": {},
    "dspark fill-in": {"deepspec": "sample_from_anchor"},
    "dspark specforge": {},
    "dspark speculators": {"deepspec": "sample_from_anchor"},
    "dspark confidence of states alone": {},
    "dspark topk": {},
    "dspark no markov": {"z-lab": "sample_from_anchor"},
}


def method_for(name: str) -> str:
    """A DSpark network without a correction is DFlash's."""
    return "dflash" if name == "dspark no markov" else name.split()[0]


HELD = [(name, kind) for name in VARIANTS for kind in FORMATS_OF[method_for(name)] if kind not in REFUSED[name]]
NOT_HELD = [(name, kind, key) for name in VARIANTS for kind, key in REFUSED[name].items()]
FOREIGN = [("eagle3 flat", "z-lab"), ("dflash zlab", "eagle"), ("dspark deepspec", "z-lab"), ("dspark rnn", "eagle")]


def drafts(model: LlamaModel, folder: Path, **settings: Any) -> list[tuple[int, ...]]:
    """All drafts of a run, round by round: what they were and how they fell."""
    keys = {"method": method_of(read_checkpoint(str(folder))), "model": str(folder), "num_speculative_tokens": 5}
    engine = tiny.make_engine(model, speculative=keys | settings)
    assert engine.drafter is not None
    seen: list[tuple[int, ...]] = []
    propose = engine.drafter.propose

    def kept(context: Any) -> Any:
        proposal = propose(context)
        seen.extend(tuple(chain) for chain in proposal.tokens)
        return proposal

    engine.drafter.propose = kept  # type: ignore[method-assign]
    prompts = [tiny.random_prompt(seed, 7 + seed) for seed in range(3)]
    tiny.run(engine, [tiny.make_request(f"r{i}", prompt, max_tokens=12) for i, prompt in enumerate(prompts)])
    return seen


def test_every_variant_is_sorted() -> None:
    assert REFUSED.keys() == VARIANTS.keys()


@pytest.mark.parametrize(("name", "kind"), HELD)
def test_an_export_drafts_as_its_source(name: str, kind: str, target_of: Find, tmp_path: Path) -> None:
    folder, model = target_of(name)
    made = VARIANTS[name]()
    settings = made.save(tmp_path / "source")
    settings = {key: value for key, value in settings.items() if key not in ("method", "model")}
    out = convert(tmp_path / "source", kind, tmp_path / "out", folder)
    assert method_of(read_checkpoint(str(out))) == method_for(name)
    expected = drafts(model, tmp_path / "source", **settings)
    assert len({token for chain in expected for token in chain}) > 5
    assert drafts(model, out, **settings) == expected


@pytest.mark.parametrize(("name", "kind", "key"), NOT_HELD)
def test_what_a_format_cannot_hold_is_named(name: str, kind: str, key: str, target_of: Find, tmp_path: Path) -> None:
    folder, _ = target_of(name)
    VARIANTS[name]().save(tmp_path / "source")
    with pytest.raises(ConfigError, match=rf"{key} is .*--format {kind} holds only .*: ") as caught:
        convert(tmp_path / "source", kind, tmp_path / "out", folder)
    assert "\n" not in str(caught.value) and caught.value.param == "format"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source"]


@pytest.mark.parametrize(("name", "kind"), FOREIGN)
def test_a_format_of_other_methods_is_refused(name: str, kind: str, target_of: Find, tmp_path: Path) -> None:
    folder, _ = target_of(name)
    VARIANTS[name]().save(tmp_path / "source")
    expected = ", ".join(FORMATS_OF[method_for(name)])
    with pytest.raises(ConfigError, match=f"{kind} .* expected {expected}"):
        convert(tmp_path / "source", kind, tmp_path / "out", folder)


@pytest.mark.parametrize(("name", "first"), HELD)
def test_exports_of_exports_are_identical(name: str, first: str, target_of: Find, tmp_path: Path) -> None:
    """Whatever the road, what arrives in a format is the same to the last key and bit."""
    folder, _ = target_of(name)
    VARIANTS[name]().save(tmp_path / "source")
    once = convert(tmp_path / "source", first, tmp_path / "once", folder)
    for kind in (kind for other, kind in HELD if other == name):
        direct = convert(tmp_path / "source", kind, tmp_path / f"direct-{kind}", folder)
        twice = convert(once, kind, tmp_path / f"twice-{kind}", folder)
        assert content(twice) == content(direct)


# ---- further limits, each alone in an otherwise fitting checkpoint ----


def _edited(name: str, **changes: Any) -> Any:
    made = VARIANTS[name]()
    made.config |= changes
    return made


def _normed(made: Any, **sizes: int) -> Any:
    made.tensors |= eagle3.norms(1, **sizes)
    return made


def _own_end(tensor: str) -> Any:
    made = VARIANTS["dflash zlab"]()
    made.tensors[tensor] = block_checkpoints.ends(3)[tensor]
    return made


DEEP = "eagle3 deepspec"
TAP_NORMS = {f"fc_norm__{index}": tiny.WIDTH for index in range(5)}
LIMITS: list[tuple[str, str, Make, str]] = [
    (DEEP, "deepspec", lambda: _edited(DEEP, norm_before_residual=True), "norm_before_residual"),
    (DEEP, "deepspec", lambda: _edited(DEEP, norm_output=True), "norm_output"),
    (DEEP, "deepspec", lambda: _edited(DEEP, logit_scale=0.5), "logit_scale"),
    (DEEP, "deepspec", lambda: _normed(_edited(DEEP, fc_norm=True), **TAP_NORMS), "fc_norm"),
    (
        DEEP,
        "deepspec",
        lambda: _normed(_edited(DEEP, norm_before_fc=True), input_norm=5 * tiny.WIDTH),
        "norm_before_fc",
    ),
    (
        DEEP,
        "speculators",
        lambda: _normed(_edited(DEEP, norm_before_fc=True, fc_norm=True), input_norm=5 * tiny.WIDTH, **TAP_NORMS),
        "fc_norm beside norm_before_fc",
    ),
    (
        DEEP,
        "deepspec",
        lambda: _edited(DEEP, layer_types=["sliding_attention"], sliding_window=4),
        "sliding_window",
    ),
    ("dflash zlab", "z-lab", lambda: _own_end("embed_tokens.weight"), "embed_tokens"),
    ("dflash zlab", "z-lab", lambda: _own_end("lm_head.weight"), "lm_head"),
    ("dflash zlab", "z-lab", lambda: _edited("dflash zlab", block_size=None), "block_size"),
    ("dflash zlab", "speculators", lambda: _edited("dflash zlab", block_size=None), "block_size"),
    ("dflash deepspec", "deepspec", lambda: _edited("dflash deepspec", is_causal=True), "is_causal"),
    ("dflash deepspec", "deepspec", lambda: _edited("dflash deepspec", logit_scale=2.0), "logit_scale"),
    ("dspark deepspec", "deepspec", lambda: _edited("dspark deepspec", is_causal=True), "is_causal"),
    ("dspark deepspec", "deepspec", lambda: _edited("dspark deepspec", dspark_draft_topk=3), "dspark_draft_topk"),
    (
        "dspark deepspec",
        "deepspec",
        lambda: _edited("dspark deepspec", layer_types=["sliding_attention"] * 3, sliding_window=6),
        "sliding_window",
    ),
]


@pytest.mark.parametrize(("name", "kind", "make", "key"), LIMITS, ids=[f"{row[1]} {row[3]}" for row in LIMITS])
def test_each_limit_is_held(name: str, kind: str, make: Make, key: str, target_of: Find, tmp_path: Path) -> None:
    folder, _ = target_of(name)
    made = make()
    made.save(tmp_path / "source")
    with pytest.raises(ConfigError, match=rf"source: {key} is .* --format {kind} holds only"):
        convert(tmp_path / "source", kind, tmp_path / "out", folder)


SETTINGS: list[tuple[str, dict[str, Any]]] = [
    ("dspark deepspec", {"is_causal": True}),
    ("dspark deepspec", {"dspark_draft_topk": 3}),
    (
        "dspark deepspec",
        {"layer_types": ["sliding_attention", "full_attention", "full_attention"], "sliding_window": 6},
    ),
    ("dspark deepspec", {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}),
]


@pytest.mark.parametrize(("name", "changes"), SETTINGS, ids=[next(iter(row[1])) for row in SETTINGS])
def test_speculators_holds_further_settings(
    name: str, changes: dict[str, Any], target_of: Find, tmp_path: Path
) -> None:
    folder, model = target_of(name)
    made = _edited(name, **changes)
    made.save(tmp_path / "source")
    out = convert(tmp_path / "source", "speculators", tmp_path / "out", folder)
    expected = drafts(model, tmp_path / "source")
    made.config = VARIANTS[name]().config
    made.save(tmp_path / "without")
    assert drafts(model, out) == expected != drafts(model, tmp_path / "without")


# ---- what a file says ----


def test_a_speculators_file_says_what_vllm_asks_for(target_of: Find, tmp_path: Path) -> None:
    folder, _ = target_of("dspark fill-in")
    VARIANTS["dspark fill-in"]().save(tmp_path / "source")
    config, _ = content(convert(tmp_path / "source", "speculators", tmp_path / "out", folder))
    assert config["speculators_model_type"] == "dspark" and config["speculators_version"]
    table = config["speculators_config"]
    assert table["algorithm"] == "dspark"
    # A block of seven in the fill-in layout gives six drafts.
    assert table["proposal_methods"][0]["speculative_tokens"] == 6
    assert table["default_proposal_method"] == table["proposal_methods"][0]["proposal_type"]
    assert table["verifier"] == {"name_or_path": folder, "architectures": ["LlamaForCausalLM"]}
    # Layers are counted in one format, numbered from 0 in the other.
    assert config["aux_hidden_state_layer_ids"] == [0, 2, 4]
    assert config["sample_from_anchor"] is False and config["sliding_window_non_causal"] is True


def test_the_stated_target_and_length_are_kept(target_of: Find, tmp_path: Path) -> None:
    folder, _ = target_of("dspark speculators")
    made = VARIANTS["dspark speculators"]()
    made.config["speculators_config"] = {
        "verifier": {"name_or_path": "some/target"},
        "proposal_methods": [{"speculative_tokens": 4}],
    }
    made.save(tmp_path / "source")
    config, _ = content(convert(tmp_path / "source", "speculators", tmp_path / "out", folder))
    table = config["speculators_config"]
    assert table["verifier"]["name_or_path"] == "some/target"
    assert table["proposal_methods"][0]["speculative_tokens"] == 4


def test_a_flat_eagle_file_is_as_published(target_of: Find, tmp_path: Path) -> None:
    folder, _ = target_of("eagle3 speculators")
    VARIANTS["eagle3 speculators"]().save(tmp_path / "source")
    out = convert(tmp_path / "source", "eagle", tmp_path / "out", folder)
    config, tensors = content(out)
    assert config["architectures"] == ["LlamaForCausalLMEagle3"] and config["model_type"] == "llama"
    # No reader's default is relied upon: they differ.
    assert [config[key] for key in ("norm_before_residual", "norm_output", "fc_norm")] == [True, False, False]
    assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [0, 3, 6]
    assert not [name for name in tensors if name.startswith("layers.")]
    source = VARIANTS["eagle3 speculators"]().tensors
    assert tensors["d2t"] == (torch.int64, source["d2t"].tolist())
    assert tensors["t2d"] == (torch.bool, source["t2d"].tolist())


def test_copies_of_the_targets_tables_are_stored_where_the_format_has_them(target_of: Find, tmp_path: Path) -> None:
    folder, model = target_of("eagle3 deepspec")
    made = VARIANTS["eagle3 deepspec"]()
    for name in ("embed_tokens.weight", "lm_head.weight"):
        del made.tensors[name]
    made.save(tmp_path / "source")
    _, tensors = content(convert(tmp_path / "source", "deepspec", tmp_path / "out", folder))
    theirs = load_file(Path(folder) / "model.safetensors")
    assert tensors["embed_tokens.weight"][1] == theirs["model.embed_tokens.weight"].tolist()
    assert tensors["lm_head.weight"][1] == theirs["lm_head.weight"].tolist()
    _, tensors = content(convert(tmp_path / "out", "speculators", tmp_path / "back", folder))
    assert "embed_tokens.weight" not in tensors


@pytest.mark.parametrize(("name", "kind"), [("eagle3 flat", "eagle"), ("dflash zlab", "speculators")])
def test_the_output_matrix_is_always_stored_where_readers_want_it(
    name: str, kind: str, target_of: Find, tmp_path: Path
) -> None:
    folder, _ = target_of(name)
    VARIANTS[name]().save(tmp_path / "source")
    _, tensors = content(convert(tmp_path / "source", kind, tmp_path / "out", folder))
    theirs = load_file(Path(folder) / "model.safetensors")
    assert tensors["lm_head.weight"][1] == theirs["lm_head.weight"].tolist()
    assert "embed_tokens.weight" not in tensors


def test_vllm_is_told_how_many_taps_there_are(target_of: Find, tmp_path: Path) -> None:
    """Its Llama class takes three for granted, however many are listed."""
    folder, _ = target_of("eagle3 deepspec")
    VARIANTS["eagle3 deepspec"]().save(tmp_path / "source")
    config, _ = content(convert(tmp_path / "source", "speculators", tmp_path / "out", folder))
    assert config["transformer_layer_config"]["num_aux_hidden_states"] == 5


def test_a_full_vocabulary_has_no_map_of_ids(target_of: Find, tmp_path: Path) -> None:
    folder, _ = target_of("dflash zlab")
    made = VARIANTS["dflash zlab"]()
    made.tensors |= {"d2t": torch.zeros(tiny.VOCAB, dtype=torch.int64), "t2d": torch.ones(tiny.VOCAB, dtype=torch.bool)}
    made.save(tmp_path / "source")
    _, tensors = content(convert(tmp_path / "source", "speculators", tmp_path / "out", folder))
    assert not {"d2t", "t2d"} & tensors.keys()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_weights_are_of_the_asked_type(dtype: str, target_of: Find, tmp_path: Path) -> None:
    folder, _ = target_of("dspark speculators")
    VARIANTS["dspark speculators"]().save(tmp_path / "source")
    out = convert(tmp_path / "source", "speculators", tmp_path / "out", folder, dtype)
    config, tensors = content(out)
    assert config["torch_dtype"] == dtype
    kinds = {str(kind) for name, (kind, _) in tensors.items() if name not in ("d2t", "t2d")}
    assert kinds == {f"torch.{dtype}"}
    with safe_open(out / "model.safetensors", framework="pt") as opened:
        assert opened.metadata() == {"format": "pt"}


def test_bfloat16_is_the_default(target_of: Find, tmp_path: Path) -> None:
    folder, _ = target_of("dflash zlab")
    VARIANTS["dflash zlab"]().save(tmp_path / "source")
    export(str(tmp_path / "source"), target=folder, format_name="z-lab", output=tmp_path / "out")
    assert content(tmp_path / "out")[1]["fc.weight"][0] == torch.bfloat16


def test_an_overflow_is_refused(target_of: Find, tmp_path: Path) -> None:
    folder, _ = target_of("dflash zlab")
    made = VARIANTS["dflash zlab"]()
    made.tensors["fc.weight"][0, 0] = 1e6
    made.save(tmp_path / "source")
    with pytest.raises(ConfigError, match=r"fc\.weight overflows in torch\.float16: .*bfloat16"):
        convert(tmp_path / "source", "z-lab", tmp_path / "out", folder, "float16")
    assert not (tmp_path / "out").exists()

"""An exported drafter's folder: whole or not there, with its profile, and only for the target that it belongs to."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors import SafetensorError

from outrider.drafting.profile import PROFILE
from outrider.errors import CapacityError, ConfigError, DrafterMismatch, LoadError
from outrider.models.llama import LlamaModel
from outrider.train import export as exporting
from outrider.train.export import export
from tests.kit.exported import VARIANTS, Find, content, convert
from tests.kit.zoo import profile, put_profile


@pytest.fixture
def source(target_of: Find, tmp_path: Path) -> tuple[Path, str]:
    """A DFlash drafter with a profile, and its target."""
    VARIANTS["dflash zlab"]().save(tmp_path / "source")
    put_profile(tmp_path / "source", profile("aa", method="dflash", num_tokens=7))
    return tmp_path / "source", target_of("dflash zlab")[0]


def test_the_profile_goes_along_and_says_n(source: tuple[Path, str], tmp_path: Path) -> None:
    out = convert(source[0], "speculators", tmp_path / "out", source[1])
    assert (out / PROFILE).read_bytes() == (source[0] / PROFILE).read_bytes()
    assert content(out)[0]["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == 7
    assert sorted(path.name for path in out.iterdir()) == ["config.json", "model.safetensors", PROFILE]
    assert len({path.stat().st_mode for path in out.iterdir()}) == 1, "whoever may read one file, may read all"


def test_a_folder_with_something_in_it_is_not_touched(source: tuple[Path, str], tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("kept")
    with pytest.raises(ConfigError, match="is there already") as caught:
        convert(source[0], "z-lab", tmp_path / "out", source[1])
    assert caught.value.param == "output"
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["mine"]


def test_an_empty_folder_is_filled(source: tuple[Path, str], tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    assert (convert(source[0], "z-lab", tmp_path / "out", source[1]) / "config.json").is_file()


@pytest.mark.parametrize(
    ("fault", "raised"),
    [(KeyboardInterrupt(), KeyboardInterrupt), (SafetensorError("No space left on device"), CapacityError)],
    ids=["Ctrl-C", "full disk"],
)
def test_nothing_half_is_left(
    fault: BaseException,
    raised: type[BaseException],
    source: tuple[Path, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def stops(tensors: Any, path: Path, **_: Any) -> None:
        path.write_bytes(b"half")
        raise fault

    monkeypatch.setattr(exporting, "save_file", stops)
    before = sorted(path.name for path in tmp_path.iterdir())
    with pytest.raises(raised):
        convert(source[0], "z-lab", tmp_path / "out", source[1])
    assert sorted(path.name for path in tmp_path.iterdir()) == before


def test_what_does_not_come_through_is_noticed(
    source: tuple[Path, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Should a writer forget a key, the reading of what it wrote shows it."""
    dumps = json.dumps

    def forgets(config: Any, **layout: Any) -> str:
        config["dflash_config"]["mask_token_id"] -= 1
        return dumps(config, **layout)

    monkeypatch.setattr(exporting.json, "dumps", forgets)
    with pytest.raises(LoadError, match=r"does not keep block\.mask_token_id"):
        convert(source[0], "z-lab", tmp_path / "out", source[1])
    assert not (tmp_path / "out").exists()


def test_a_broken_source_is_not_passed_on(source: tuple[Path, str], tmp_path: Path) -> None:
    made = VARIANTS["dflash zlab"]()
    made.tensors["norm.weight"][0] = float("nan")
    made.save(source[0])
    with pytest.raises(DrafterMismatch, match=r"norm\.weight"):
        convert(source[0], "z-lab", tmp_path / "out", source[1])
    assert not (tmp_path / "out").exists()


def test_another_targets_drafter_is_refused(targets: dict[int, tuple[str, LlamaModel]], tmp_path: Path) -> None:
    VARIANTS["dflash zlab"]().save(tmp_path / "source")
    with pytest.raises(DrafterMismatch, match="number of target layers of 4, the target one of 6"):
        convert(tmp_path / "source", "z-lab", tmp_path / "out", targets[6][0])


def test_a_model_that_is_no_drafter_is_refused(source: tuple[Path, str], tmp_path: Path) -> None:
    shutil.copytree(source[1], tmp_path / "model")
    with pytest.raises(ConfigError, match="cannot be exported, expected one of eagle3, dflash, dspark"):
        convert(tmp_path / "model", "speculators", tmp_path / "out", source[1])


@pytest.mark.parametrize(
    ("changes", "param"),
    [({"format_name": "gguf"}, "format"), ({"dtype": "int8"}, "dtype"), ({"output": Path("/no/such/place")}, "output")],
)
def test_bad_settings_are_named(changes: dict[str, Any], param: str, source: tuple[Path, str], tmp_path: Path) -> None:
    settings = {"format_name": "z-lab", "output": tmp_path / "out"} | changes
    with pytest.raises(ConfigError, match=f"--{param} ") as caught:
        export(str(source[0]), target=source[1], **settings)
    assert caught.value.param == param

"""Installed drafters are found through their entry point, matched by fingerprint, and refused where they are broken."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from outrider.drafting import zoo
from outrider.drafting.profile import PROFILE, read_profile
from outrider.errors import ConfigError, LoadError
from tests.kit.zoo import install, profile, put_profile


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of installed packages; what this machine has besides is not seen."""
    folder = tmp_path / "site"
    folder.mkdir()
    everywhere = zoo.entry_points
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setattr(
        zoo, "entry_points", lambda group: [item for item in everywhere(group=group) if item.module != "outrider_zoo"]
    )
    return folder


def test_every_drafter_of_every_package_is_listed(site: Path) -> None:
    put_profile(install(site, "one_zoo") / "tiny" / "dspark", profile("aa"))
    other = install(site, "other_zoo")
    put_profile(other / "large" / "eagle3", profile("bb", "eagle3", 7, target={"name": "Large", "fingerprint": "bb"}))
    put_profile(other / "large" / "dflash", profile("bb", "dflash", 6))
    (other / "large" / "dflash" / "model.safetensors").write_bytes(b"x" * 1000)
    found = zoo.drafters()
    assert [drafter.name for drafter in found] == ["large/dflash", "large/eagle3", "tiny/dspark"]
    assert [drafter.profile.num_speculative_tokens for drafter in found] == [6, 7, 4]
    assert found[1].profile.target == "Large"
    assert found[0].path == (other / "large" / "dflash").resolve()
    assert found[0].size_bytes == 1000 + (found[0].path / PROFILE).stat().st_size


def test_only_packages_of_the_group_count_and_only_folders_with_a_profile(site: Path) -> None:
    put_profile(install(site, "stranger", "other.group") / "tiny" / "dspark", profile("aa"))
    folder = install(site, "some_zoo")
    (folder / "tiny" / "dspark").mkdir(parents=True)
    put_profile(folder / "too" / "deep" / "down", profile("aa"))
    put_profile(folder / "shallow", profile("aa"))
    assert zoo.drafters() == []


def test_a_package_whose_folder_is_gone_offers_nothing(site: Path) -> None:
    shutil.rmtree(install(site))
    assert zoo.drafters() == []


def test_a_drafter_is_matched_by_method_and_fingerprint_not_by_a_name(site: Path) -> None:
    folder = install(site)
    right = put_profile(folder / "a" / "x", profile("aa", "dspark"))
    put_profile(folder / "b" / "dspark", profile("bb", "dspark"))
    put_profile(folder / "a" / "dspark", profile("aa", "eagle3"))
    found = zoo.find("dspark", "aa")
    assert found is not None and found.path == right.resolve()
    assert zoo.find("dspark", "cc") is None
    assert zoo.find("dflash", "aa") is None
    assert zoo.methods_for("aa") == ["dspark", "eagle3"]
    assert zoo.methods_for("cc") == []


def test_two_that_fit_are_no_choice(site: Path) -> None:
    paths = [put_profile(install(site, name) / "t" / "dspark", profile("aa")) for name in ("one_zoo", "two_zoo")]
    with pytest.raises(ConfigError) as caught:
        zoo.find("dspark", "aa")
    assert caught.value.param == "model"
    assert all(str(path.resolve()) in str(caught.value) for path in paths)
    assert zoo.find("eagle3", "aa") is None


def test_a_broken_profile_is_named(site: Path) -> None:
    folder = put_profile(install(site) / "tiny" / "dspark", "{")
    with pytest.raises(LoadError, match=str(folder.resolve() / PROFILE)):
        zoo.drafters()


def test_a_folder_without_a_profile_has_none(tmp_path: Path) -> None:
    assert read_profile(tmp_path) is None


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"method": None}, "method is None"),
        ({"method": ""}, "method is ''"),
        ({"num_speculative_tokens": 0}, "num_speculative_tokens is 0"),
        ({"num_speculative_tokens": True}, "num_speculative_tokens is True"),
        ({"num_speculative_tokens": "4"}, "num_speculative_tokens is '4'"),
        ({"target": "tiny"}, "target is 'tiny'"),
        ({"target": {"name": "tiny"}}, "fingerprint is None"),
        ({"target": {"fingerprint": "aa"}}, "name is None"),
    ],
)
def test_a_profile_that_says_nonsense_names_the_key(changes: dict[str, Any], named: str, tmp_path: Path) -> None:
    put_profile(tmp_path, json.dumps(profile("aa") | changes))
    with pytest.raises(LoadError) as caught:
        read_profile(tmp_path)
    assert named in str(caught.value) and PROFILE in str(caught.value) and "\n" not in str(caught.value)

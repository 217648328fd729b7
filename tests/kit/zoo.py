"""A zoo package without an installer: a folder for sys.path that importlib.metadata takes for an installed one."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from outrider.drafting.profile import PROFILE
from outrider.drafting.zoo import GROUP


def install(site: Path, module: str = "some_zoo", group: str = GROUP) -> Path:
    """Put an empty zoo package into `site`; gives the module's folder. Importing the module raises."""
    folder = site / module
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text("raise AssertionError('a zoo is located, never run')\n", encoding="utf-8")
    record = site / f"{module}-1.0.dist-info"
    record.mkdir()
    (record / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {module}\nVersion: 1.0\n", encoding="utf-8")
    (record / "entry_points.txt").write_text(f"[{group}]\nzoo = {module}\n", encoding="utf-8")
    return folder


def profile(fingerprint: str, method: str = "dspark", num_tokens: int = 4, **changes: Any) -> dict[str, Any]:
    """What a speculation_profile.json holds, with something in it that nobody reads."""
    target = {"name": "tiny", "fingerprint": fingerprint}
    made = {"target": target, "method": method, "num_speculative_tokens": num_tokens, "measured": {"tau": 2.5}}
    return made | changes


def put_profile(folder: Path, content: Mapping[str, Any] | str) -> Path:
    """Write a drafter's profile into its folder; gives the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    text = content if isinstance(content, str) else json.dumps(content)
    (folder / PROFILE).write_text(text, encoding="utf-8")
    return folder

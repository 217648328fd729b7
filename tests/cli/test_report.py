"""`outrider report`: a page, a JSON and a few lines of one file, and one line for what is no such file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from outrider.drafting.policy import read_policy
from tests.kit.command import Here
from tests.kit.sweeps import IDENTITY, TABLE, swept


def test_page_json_and_lines_come_of_one_file(here: Here, tmp_path: Path) -> None:
    pytest.importorskip("plotly")
    table, html, found = tmp_path / "t.csv", tmp_path / "t.html", tmp_path / "t.json"
    table.write_text(TABLE)
    ended = here("report", str(table), "--html", str(html), "--json", str(found))
    assert ended.code == 0, ended.err
    assert "org/m" in html.read_text() and json.loads(found.read_text())["num_cells"] == 3
    assert "N=1 1.50x" in ended.out and "1 of 3 choices are slower" in ended.out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("nowhere.csv",), "no such file"),
        (("{file}", "--html", "/nowhere/a.html"), "no such folder"),
        (("{file}", "--json", "/nowhere/a.json"), "no such folder"),
    ],
)
def test_what_cannot_be_shown_is_refused_in_one_line(
    here: Here, tmp_path: Path, words: tuple[str, ...], said: str
) -> None:
    (tmp_path / "t.csv").write_text(TABLE)
    ended = here("report", *(word.format(file=tmp_path / "t.csv") for word in words))
    assert ended.code == 2 and said in ended.err and ended.err.count("\n") == 1


def test_a_sweeps_report_writes_its_policy_and_a_table_has_none(here: Here, tmp_path: Path) -> None:
    policy, table = tmp_path / "policy.json", tmp_path / "t.csv"
    ended = here("report", str(swept(tmp_path / "r.jsonl")), "--policy", str(policy))
    assert ended.code == 0, ended.err
    found = read_policy(policy)
    assert found.fingerprint == IDENTITY and found.rule("math") is not None
    policy.unlink()
    table.write_text(TABLE)
    ended = here("report", str(table), "--policy", str(policy))
    assert ended.code == 2 and "needs a sweep's results" in ended.err and not policy.exists()

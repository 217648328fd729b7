"""Reports: the published table's facts, all of them in the JSON, and a page that stands alone."""

from __future__ import annotations

import csv
import json
import re
from pathlib import Path

import pytest

from outrider.bench.page import page
from outrider.bench.parquet import write_parquet
from outrider.bench.results import ResultsFile
from outrider.bench.summary import lines, summarize
from outrider.errors import LoadError
from tests.kit import sweeps

needs_published = pytest.mark.skipif(not sweeps.PUBLISHED.is_file(), reason="the published table is not here")


@needs_published
def test_the_published_table_says_what_was_published() -> None:
    found = summarize(sweeps.PUBLISHED)
    with sweeps.PUBLISHED.open(encoding="utf-8") as file:
        published = list(csv.DictReader(file))
    assert found["num_cells"] == len(published) == 400 and len(found["below_plain"]) == 25
    best: dict[tuple[str, str, str], tuple[float, int, float]] = {}
    for row in published:
        key = row["model"], row["method"], row["dataset"]
        if key not in best or float(row["speedup"]) > best[key][0]:
            best[key] = float(row["speedup"]), int(row["N"]), float(row["MAL"])
    ours = {
        (cell["place"]["target"], cell["method"], cell["place"]["workload"]): (
            cell["speedup"]["ratio"],
            cell["num_speculative_tokens"],
            cell["mean_acceptance_length"],
        )
        for cell in found["best_of_methods"]
    }
    assert ours == best
    assert ours["google/gemma-4-26B-A4B-it", "DFlash", "MATH500"] == (2.87, 7, 5.26)
    assert min(cell["speedup"]["ratio"] for cell in found["below_plain"]) == 0.44


@needs_published
def test_the_published_tables_page_shows_its_facts() -> None:
    pytest.importorskip("plotly")
    text = page(summarize(sweeps.PUBLISHED))
    assert re.search(r"2\.87x</span>\s*<small>N=7, 5\.26</small>", text)
    assert "25 of 400 choices" in text and text.count("<figure>") > 36 * 2


def test_a_table_is_known_by_its_columns_and_escaped_on_the_page(tmp_path: Path) -> None:
    pytest.importorskip("plotly")
    path = tmp_path / "t.csv"
    path.write_text(sweeps.TABLE)
    found = summarize(path)
    assert found["kind"] == "publication" and [cell["method"] for cell in found["below_plain"]] == [
        "Some <b>method</b>"
    ]
    shares = {cell["num_speculative_tokens"]: cell["acceptance_shares"] for cell in found["cells"]}
    assert shares[2] == pytest.approx((0.1, 0.4, 0.5)) and shares[3] == pytest.approx((0.2, 0.3, 0.3, 0.2))
    text = page(found)
    assert "<b>method</b>" not in text and "&lt;b&gt;method&lt;/b&gt;" in text and "no intervals" in text


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (sweeps.HEADER, "without lines"),
        (sweeps.HEADER + "m,d,GSM8K,100,x,1.5,150,1.9,90,90\n", "line 2"),
        (sweeps.HEADER + "m,d,GSM8K,100,0,1.5,150,1.9,90,90\n", "line 2: expected"),
        (sweeps.HEADER + "m,d,GSM8K,100\n", "line 2"),
        ("a,b,c\n1,2,3\n", "no header"),
        ("", "no header"),
    ],
)
def test_a_table_that_is_none_is_refused(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "t.csv"
    path.write_text(text)
    with pytest.raises(LoadError, match=said):
        summarize(path)


def test_a_file_without_a_pair_is_refused(tmp_path: Path) -> None:
    ResultsFile.open(tmp_path / "r.jsonl", sweeps.header(sweeps.grid()))
    with pytest.raises(LoadError, match="no choice was measured"):
        summarize(tmp_path / "r.jsonl")
    with pytest.raises(LoadError, match="no such file"):
        summarize(tmp_path / "none.jsonl")


def test_the_page_of_a_sweep_stands_alone_and_says_what_the_json_says(tmp_path: Path) -> None:
    pytest.importorskip("plotly")
    found = json.loads(json.dumps(summarize(sweeps.swept(tmp_path / "r.jsonl"))))
    text = page(found)
    own = re.sub(r"(?s)<script>.*?</script>", "", text)
    assert not re.search(r"(?:src|href)\s*=|url\(|@import", own), "nothing is fetched"
    assert text.count("<script>") == 2 and "plotly.js" in text
    for item in found["recommendations"]:
        assert f"{item['speedup']['ratio']:.2f}x" in own
    for cell in found["below_plain"]:
        assert f"{cell['speedup']['ratio']:.2f}x" in own
    assert "it is slow" in own and "prefers-color-scheme: dark" in own
    figures = json.loads(re.search(r'(?s)id="figures">(.*?)</script>', text)[1])  # type: ignore[index]
    assert len(figures) == own.count("<figure>") and all(figure["data"] for figure in figures)
    titles = re.findall(r"<h2>(.*?)</h2>", own)
    assert {"Throughput against N", "Speedup", "Where the time goes", "Acceptance by output position"} <= set(titles)
    assert "The file does not say" not in own


def test_slow_cells_are_marked_on_the_heat_map(tmp_path: Path) -> None:
    pytest.importorskip("plotly")
    from outrider.bench.figures import sections

    found = summarize(sweeps.swept(tmp_path / "r.jsonl"))
    [heat] = [section for section in sections(found) if section.title == "Speedup"]
    for chart in heat.charts:
        [trace] = chart.figure["data"]
        for ratios, texts in zip(trace["z"], trace["text"], strict=True):
            assert all(text.startswith("▼") == (ratio < 1) for ratio, text in zip(ratios, texts, strict=True))
    assert len(heat.charts) == 2, "one for each load"


def test_notes_say_what_is_missing_and_what_was_cut(tmp_path: Path) -> None:
    path = sweeps.swept(tmp_path / "r.jsonl")
    text = path.read_bytes()
    path.write_bytes(text[: len(text) // 2])
    said = "\n".join(lines(summarize(path)))
    assert "the file is cut" in said and "the sweep is not finished" in said


def test_parquet_makes_the_same_report(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    path = sweeps.swept(tmp_path / "r.jsonl")
    from outrider.bench.results import read

    write_parquet(tmp_path / "r.parquet", read(path))
    assert summarize(path) | {"file": ""} == summarize(tmp_path / "r.parquet") | {"file": ""}

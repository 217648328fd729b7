"""A report's page in a real browser, on a desk and on a phone: every picture is drawn, nothing is fetched, nothing
sticks out. Needs playwright and a Chromium of the system's; without them the page's text alone is tested elsewhere.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from outrider.bench.page import page
from outrider.bench.summary import summarize
from tests.kit.sweeps import TABLE, swept

CHROMIUM = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
)


@pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium here")
@pytest.mark.parametrize("width", [1280, 400])
def test_the_page_opens_from_a_disk_and_fits(tmp_path: Path, width: int) -> None:
    pytest.importorskip("plotly")
    browsers = pytest.importorskip("playwright.sync_api")
    (tmp_path / "t.csv").write_text(TABLE)
    sources = {"sweep": swept(tmp_path / "r.jsonl"), "table": tmp_path / "t.csv"}
    with browsers.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        for name, source in sources.items():
            html = tmp_path / f"{name}.html"
            html.write_text(page(summarize(source)), encoding="utf-8")
            shown = browser.new_page(viewport={"width": width, "height": 800})
            faults: list[str] = []
            fetched: list[str] = []
            shown.on("pageerror", lambda error, faults=faults: faults.append(str(error)))
            shown.on("console", lambda said, faults=faults: faults.append(said.text) if said.type == "error" else None)
            shown.on("request", lambda request, fetched=fetched: fetched.append(request.url))
            shown.goto(html.as_uri())
            shown.evaluate("() => document.querySelectorAll('details').forEach((part) => { part.open = true; })")
            shown.evaluate("() => window.dispatchEvent(new Event('beforeprint'))")
            shown.wait_for_function("document.querySelectorAll('.chart svg.main-svg').length > 0")
            pictures = shown.evaluate(
                "[...document.querySelectorAll('.chart')].map((c) => !!c.querySelector('.main-svg'))"
            )
            assert pictures and all(pictures) and faults == [] and fetched == [html.as_uri()]
            assert shown.evaluate("document.documentElement.scrollWidth") <= width
        browser.close()

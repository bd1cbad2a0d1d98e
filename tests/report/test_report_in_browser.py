"""The page in a headless Chromium: its text is read, every control is used, and the effect is read."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from html import unescape
from pathlib import Path
from typing import Any

import pytest
from made_up_run import make_run

from tlt.report import write_report

NAMES = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
BROWSER = next((path for name in NAMES if (path := shutil.which(name))), None)
pytestmark = pytest.mark.skipif(BROWSER is None, reason="needs Chromium, such as Debian's chromium-headless-shell")

# put first on the page, so that it sees all errors
SCRIPT = """
<script>
const seen = {errors: []}, find = (what) => document.querySelector(what);
const all = (what) => [...document.querySelectorAll(what)];
window.addEventListener("error", (event) => seen.errors.push(event.message));
setTimeout(() => {
  seen.wide = document.documentElement.scrollWidth <= window.innerWidth;
  seen.fetched = performance.getEntriesByType("resource").length;
  seen.sections = Object.fromEntries(all("section").map((one) => [one.id, one.innerText]));
  seen.links = all("nav a").map((link) => link.getAttribute("href"));
  seen.tabs = all("input, summary, .chart > svg").every((one) => one.tabIndex === 0);
  use();
  document.body.textContent = "SEEN" + JSON.stringify(seen) + "NEES";
}, 300);
</script>
"""

USE = """
<script>
const press = (element, key) => element.dispatchEvent(new KeyboardEvent("keydown", {key, bubbles: true}));
function use() {
  const chart = find(".chart > svg");
  press(chart, "Home"); seen.first = chart.parentElement.querySelector("output").textContent;
  press(chart, "ArrowRight"); seen.second = chart.parentElement.querySelector("output").textContent;
  const box = chart.getBoundingClientRect();
  chart.dispatchEvent(new PointerEvent("pointermove", {clientX: box.right - 1, clientY: box.top + 5}));
  seen.last = chart.parentElement.querySelector("output").textContent;
}
</script>
"""


def seen_in(path: Path, width: int = 1200, use: str = "<script>function use() {}</script>") -> dict[str, Any]:
    """Open a page in a window of this width, use its controls, and return the texts."""
    path.write_text(path.read_text(encoding="utf-8").replace("<head>", "<head>" + SCRIPT + use, 1), encoding="utf-8")
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=3000", "--dump-dom"]
    command = [BROWSER, *options, f"--window-size={width},900", path.as_uri()]
    dom = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout
    found = re.search(r"SEEN(\{.*)NEES", unescape(dom), re.DOTALL)
    assert found, dom[-2000:]
    return json.loads(found[1])


@pytest.mark.parametrize("width", [1200, 500])
def test_every_control_works(tmp_path: Path, width: int) -> None:
    seen = seen_in(write_report(make_run(tmp_path / "run", steps=4)), width, USE)
    assert seen["errors"] == []
    assert seen["wide"], "the page is wider than the window"
    assert seen["first"].startswith("step 0: tlt 4, plain decoding 6")
    assert seen["second"].startswith("step 1: ")
    assert seen["last"].startswith("step 3: ")
    assert seen["tabs"]


def test_each_section_shows_its_numbers(tmp_path: Path) -> None:
    seen = seen_in(write_report(make_run(tmp_path / "run", steps=8)))
    assert seen["fetched"] == 0
    assert seen["links"] == [f"#{name}" for name in seen["sections"]]
    words = {
        "words": ["small was trained for 8 of 8 steps in 86 s on 2 workers; the run ended."],
        "plain": ["27.0 s\t20.0 s\t1.35"],
        "proof": ["ab" * 32, "800 in 40 responses", "responses that differ\t0"],
        "time": ["Useful share of worker time: 65.0%.", "verify\t8 s\t5.0%", "ui.perfetto.dev"],
        "learning": ["Mean reward", "gcd", "Gradient norm", "mean@2", "99.9 % of tokens"],
        "drafter": ["Acceptance rate by depth: eagle", "depth 1\ndepth 2\n\nA depth counts", "Version of the drafter"],
        "energy": [
            *("processes\t80 s\t10 s", "Does speculation save energy?", "sums include the comparisons"),
            "processes\t40 s\t32 s\t0.80",
        ],
    }
    assert list(seen["sections"]) == list(words)
    missing = [(name, word) for name in words for word in words[name] if word not in seen["sections"][name]]
    assert missing == [], seen["sections"]


def test_a_run_that_was_killed_in_its_first_step_has_a_page(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model": {"path": "m"}}', encoding="utf-8")
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "rew', encoding="utf-8")
    seen = seen_in(write_report(tmp_path))
    assert seen["errors"] == []
    for said in ("The run of m has not ended a step yet.", "metrics.jsonl has 1 damaged", "summary.json is missing"):
        assert said in seen["sections"]["words"]

"""The page in a headless Chromium: every control is used, and what it changes is read back."""

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

SCRIPT = """
<script>
const seen = {errors: []}, find = (what) => document.querySelector(what);
const all = (what) => [...document.querySelectorAll(what)];
window.addEventListener("error", (event) => seen.errors.push(event.message));
const press = (element, key) => element.dispatchEvent(new KeyboardEvent("keydown", {key, bubbles: true}));
const choose = (select, value) => { select.value = value; select.dispatchEvent(new Event("change", {bubbles: true})); };
const picture = () => find("canvas").toDataURL();
setTimeout(() => {
  seen.wide = document.documentElement.scrollWidth <= window.innerWidth;
  const chart = find("[data-chart]");
  press(chart, "Home"); seen.first = chart.parentElement.querySelector("output").textContent;
  press(chart, "ArrowRight"); seen.second = chart.parentElement.querySelector("output").textContent;
  const box = chart.getBoundingClientRect();
  chart.dispatchEvent(new PointerEvent("pointermove", {clientX: box.right - 1, clientY: box.top + 5}));
  seen.last = chart.parentElement.querySelector("output").textContent;
  seen.buttons = {};
  for (const button of all(".timeline button")) {
    const before = picture(); button.click(); seen.buttons[button.dataset.do] = picture() !== before;
    if (button.dataset.do === "out") find("[data-do=in]").click();
  }
  seen.keys = ["-", "+", "ArrowRight", "ArrowLeft"].map((key) => {
    const before = picture(); press(find("canvas"), key); return picture() !== before; });
  choose(find(".timeline select"), "2"); seen.lanes = find(".timeline .legend").textContent;
  const canvas = find("canvas").getBoundingClientRect();
  find("canvas").dispatchEvent(new PointerEvent("pointermove", {clientX: canvas.left + 5, clientY: canvas.top + 22}));
  seen.span = find(".timeline output").textContent;
  choose(find(".ribbons select"), "3");
  seen.ribbon = all(".ribbons [data-step]").filter((one) => !one.hidden).map((one) => one.dataset.step);
  const search = find("#search"); search.value = "What is 1"; search.dispatchEvent(new Event("input"));
  seen.hits = find("#hits").textContent;
  find(".group:not([hidden]) summary").click(); seen.opened = find(".group:not([hidden])").open;
  seen.links = all("nav a").every((link) => find(link.getAttribute("href")));
  seen.tabs = all("button, select, input, summary, canvas, [data-chart]").every((one) => one.tabIndex === 0);
  document.body.textContent = "SEEN" + JSON.stringify(seen) + "NEES";
}, 300);
</script>
"""


def seen_in(path: Path, width: int) -> dict[str, Any]:
    """Open a page with the script in a frame of this width, use all controls, and return what was seen."""
    assert BROWSER
    path.write_text(path.read_text(encoding="utf-8").replace("</body>", SCRIPT + "</body>"), encoding="utf-8")
    options = [
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        f"--window-size={width},900",
        "--virtual-time-budget=3000",
    ]
    command = [BROWSER, *options, "--dump-dom", path.as_uri()]
    dom = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout
    found = re.search("SEEN(.*)NEES", unescape(dom), re.DOTALL)
    assert found, dom[-2000:]
    return json.loads(found[1])


@pytest.mark.skipif(BROWSER is None, reason="needs Chromium, such as Debian's chromium-headless-shell")
@pytest.mark.parametrize("width", [1200, 500])
def test_every_control_does_what_it_says(tmp_path: Path, width: int) -> None:
    seen = seen_in(write_report([make_run(tmp_path / "run", steps=4)]), width)
    assert seen["errors"] == []
    assert seen["wide"], "the page is wider than the window"
    assert seen["first"].startswith("step 0: tlt, measured 4, plain decoding, measured 6")
    assert seen["second"].startswith("step 1: ")
    assert seen["last"].startswith("step 3: ")
    assert seen["buttons"] == dict.fromkeys(("in", "out", "left", "right"), True)
    assert seen["keys"] == [True] * 4
    assert seen["lanes"] == "IDLEROLLOUTrollout"
    assert seen["span"].startswith("worker 0: ROLLOUT, 6.00 s")
    assert seen["ribbon"] == ["3"]
    assert seen["hits"] == "4 of 8 groups"
    assert seen["opened"]
    assert seen["links"]
    assert seen["tabs"]

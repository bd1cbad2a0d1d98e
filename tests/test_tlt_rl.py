"""The distribution's name is the same everywhere."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import tlt_rl

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def tracked_texts() -> dict[str, str]:
    names = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    texts = {}
    for name in filter(None, names.split("\0")):
        content = (ROOT / name).read_bytes() if (ROOT / name).is_file() else b"\0"
        if b"\0" not in content:
            texts[name] = content.decode("utf-8", errors="replace")
    return texts


def test_the_name_is_that_of_pyproject() -> None:
    assert PROJECT["name"] == tlt_rl.DISTRIBUTION
    assert tlt_rl.install_hint("trl") == "pip install 'tlt-rl[trl]'"


def test_every_extra_that_is_named_is_one_of_this_distribution() -> None:
    texts = tracked_texts()
    assert len(texts) > 300
    other = re.compile(r"\btlt\\?\[")  # of the other package; in a regular expression the bracket has a backslash
    assert [name for name, text in texts.items() if other.search(text)] == []
    named = re.compile(r"""tlt-rl\\?\[(\w+)|install_hint\(['"](\w+)""")
    extras = {extra or hint for text in texts.values() for extra, hint in named.findall(text)}
    assert {"trl", "wandb", "cluster"} <= extras <= PROJECT["optional-dependencies"].keys()


def test_an_interrupt_during_the_imports_is_one_line(tmp_path: Path) -> None:
    shutil.copy(ROOT / "src" / "tlt_rl.py", tmp_path)
    (tmp_path / "tlt").mkdir()
    (tmp_path / "tlt" / "cli.py").write_text("raise KeyboardInterrupt")
    code = "import tlt_rl; tlt_rl.main()"
    done = subprocess.run([sys.executable, "-S", "-c", code], cwd=tmp_path, env={}, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (130, "tlt: interrupted\n")

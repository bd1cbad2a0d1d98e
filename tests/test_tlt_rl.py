"""The distribution's name is the same everywhere. The other package called tlt gets an error with the remedy."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

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


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """Return a folder of packages with our modules, in which the other package is installed too."""
    (tmp_path / "tlt" / "models").mkdir(parents=True)
    shutil.copy(ROOT / "src" / "tlt_rl.py", tmp_path)
    shutil.copy(ROOT / "src" / "tlt" / "__init__.py", tmp_path / "tlt")
    (tmp_path / "tlt" / "models" / "lvvit.py").touch()
    return tmp_path


def python(site: Path, code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-S", "-c", code], cwd=site, env={}, capture_output=True, text=True)


REMEDY = "pip uninstall -y tlt, then pip install --force-reinstall --no-deps tlt-rl"


def test_our_package_over_the_other_one_is_refused_at_import_and_alone_it_is_accepted(site: Path) -> None:
    done = python(site, "import tlt")
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("ImportError: another package, tlt (Token Labeling Toolbox)")
    assert REMEDY in done.stderr
    (site / "tlt" / "models" / "lvvit.py").unlink()
    assert python(site, "import tlt; print(tlt.__version__)").stdout == f"{PROJECT['version']}\n"


@pytest.mark.parametrize("uninstalled", [False, True])
def test_the_other_package_over_ours_is_refused_by_the_command(site: Path, uninstalled: bool) -> None:
    """It is still there, or it was uninstalled together with our `__init__.py`."""
    (site / "tlt" / "__init__.py").write_text("")
    if uninstalled:
        (site / "tlt" / "models" / "lvvit.py").unlink()
        (site / "tlt" / "__init__.py").unlink()
    done = python(site, "import tlt_rl; tlt_rl.main()")
    assert done.returncode == 1
    assert done.stderr.startswith("tlt: another package")
    assert REMEDY in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_an_interrupt_during_the_imports_is_one_line(site: Path) -> None:
    (site / "tlt" / "models" / "lvvit.py").unlink()
    (site / "tlt" / "cli.py").write_text("raise KeyboardInterrupt")
    done = python(site, "import tlt_rl; tlt_rl.main()")
    assert (done.returncode, done.stderr) == (130, "tlt: interrupted\n")

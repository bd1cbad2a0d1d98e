"""Every recipe is short and can be trained. Its data are the output of a script. The forecast's score is proper."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from scipy import integrate, stats
from tiny import load_script, tiny_model, train

from tlt.config import load_config
from tlt.draft.eagle import EagleLayer, eagle_options, save_drafter
from tlt.metrics import read_metrics
from tlt.models.families import decoder_options, read_config
from tlt.types import Prompt

FOLDER = Path(__file__).parent.parent / "recipes"
RECIPES = sorted(FOLDER.glob("*.toml"))


@pytest.fixture(scope="module")
def model(home: Path) -> Path:
    return tiny_model(home / "model")


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_is_short_and_runs(recipe: Path, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(recipe.read_text(encoding="utf-8").splitlines()) < 50
    monkeypatch.chdir(tmp_path)  # files that it names are in its folder
    small = ("train.steps", "rollout.prompts_per_step", "rollout.group_size", "eval.size", "eval.samples")
    overrides: dict[str, Any] = dict.fromkeys(small, 2) | {"rollout.max_new_tokens": 6}
    overrides |= {"model.path": model, "run.folder": tmp_path / "run"}
    if "\nchat = true" in recipe.read_text(encoding="utf-8"):  # the tiny model has no chat template
        overrides["model.path"] = shutil.copytree(model, tmp_path / "model")
        template = "{% for m in messages %}{{ m.content }}{% endfor %}{{ '' if enable_thinking else '' }}"
        (tmp_path / "model" / "chat_template.jinja").write_text(template)
    if "-drafter" in recipe.read_text(encoding="utf-8"):  # made for another model
        options = eagle_options(decoder_options(read_config(model)), "eagle3", window=16)
        save_drafter(EagleLayer(options), tmp_path / "drafter")
        overrides["speculation.path"] = tmp_path / "drafter"
    config = load_config(recipe, [f"--{key}={value}" for key, value in overrides.items()])
    summary = train(config)
    assert summary["steps"] == 2
    assert bool(summary["eval_last"]) == bool(config.eval.every)
    assert not summary["without_reward"]
    consumed = [pair for line in read_metrics(tmp_path / "run") for pair in line["prompts"]]
    assert len(consumed) == 4


def test_there_is_a_recipe_of_each_kind() -> None:
    assert {path.stem for path in RECIPES} >= {"quickstart", "word_problems", "curriculum", "forecast", "smollm2"}


def test_the_data_are_the_output_of_their_scripts(tmp_path: Path) -> None:
    load_script(FOLDER / "make_data.py").write(tmp_path)
    for path in tmp_path.iterdir():
        assert path.read_bytes() == (FOLDER / "data" / path.name).read_bytes(), path.name
    assert len(list(tmp_path.iterdir())) == 8


keywords, forecast = load_script(FOLDER / "keywords.py"), load_script(FOLDER / "forecast.py")


@pytest.mark.parametrize(
    ("text", "share"),
    [("", 0.0), ("A RIVER.", 0.5), ("rivers and lanterns", 0.0), ("the lantern by the river, river", 1.0)],
)
def test_the_share_of_words_counts_whole_words_once(text: str, share: float) -> None:
    assert keywords.share_of_words(Prompt(0, "", (1,), {"answer": "river, lantern"}), text) == share


@pytest.mark.parametrize(("mean", "deviation", "came"), [(0, 1, 0), (3, 2, 5), (-1, 0.5, 4), (10, 6, 9.5)])
def test_crps_is_the_integral_that_defines_it(mean: float, deviation: float, came: float) -> None:
    def squared(x: float) -> float:
        return (stats.norm.cdf(x, mean, deviation) - (x >= came)) ** 2

    low, high = min(mean, came) - 12 * deviation, max(mean, came) + 12 * deviation
    integral, _ = integrate.quad(squared, low, high, points=[came], limit=400)
    assert forecast.crps_of_normal(mean, deviation, came) == pytest.approx(integral, abs=1e-6)


@pytest.mark.parametrize("answer", ["", "about forty", "40", "40 0", "40 -1", "1 2 3", "40 1e999", "9" * 400 + " 1"])
def test_an_answer_without_a_distribution_gets_the_lowest_score(answer: str) -> None:
    assert forecast.crps(Prompt(0, "", (1,), {"answer": 41, "scale": 2.0}), answer) == forecast.WORST


def test_a_forecast_is_scored_in_steps_of_its_series() -> None:
    prompt = Prompt(0, "", (1,), {"answer": 41, "scale": 2.0})
    assert forecast.crps(prompt, "40 2.5") == pytest.approx(-forecast.crps_of_normal(40, 2.5, 41) / 2)
    assert forecast.crps(prompt, "mean 41, deviation 0.01") == pytest.approx(0, abs=0.01)
    assert forecast.crps(prompt, "900 1") == forecast.WORST

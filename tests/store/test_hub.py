"""Names on the Hugging Face hub, against a server on loopback."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets
import pytest
from hub_server import Files, Hub, files_in
from huggingface_hub import constants, file_download
from tiny import QUESTIONS, tiny_config, tiny_model, train

from tlt.cli import main
from tlt.config import Config, ConfigError
from tlt.data.prompts import load_prompts
from tlt.data.tables import read_rows
from tlt.store.hub import HubError, from_hub, local_data, local_model

MODEL, DATA = "models/org/tiny", "datasets/org/sums"


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Files:
    """Return the files of a model, and files that tlt must not download."""
    folder = tiny_model(tmp_path_factory.mktemp("weights"))
    unwanted = ("pytorch_model.bin", "tiny.gguf", "onnx/model.safetensors", "consolidated.safetensors")
    return files_in(folder) | dict.fromkeys(unwanted, b"unwanted") | {"tokenization_tiny.py": b"1/0"}


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, weights: Files) -> Iterator[Hub]:
    """Return a hub with the model `org/tiny`. Its cache is in tmp_path."""
    server = Hub()
    server.commit(MODEL, weights)
    monkeypatch.setattr(constants, "ENDPOINT", server.address)
    template = server.address + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    for name in ("HF_HUB_CACHE", "HF_ASSETS_CACHE", "HF_TOKEN_PATH"):
        monkeypatch.setattr(constants, name, str(tmp_path / name))
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.chdir(tmp_path)
    yield server
    server.close()


def rows(*questions: str) -> bytes:
    return "\n".join(json.dumps({"question": q, "answer": q[0]}) for q in questions).encode()


def config(home: Path, steps: int = 1, **sections: dict[str, Any]) -> Config:
    short = {"rollout": {"max_new_tokens": 2}, "train": {"steps": steps}, "model": {"path": "org/tiny"}}
    return tiny_config(home, **short | sections)


def exit_code(words: list[str]) -> Any:
    with pytest.raises(SystemExit) as ended:
        main(words)
    return ended.value.code


def recorded(home: Path) -> dict[str, Any]:
    return json.loads((home / "run" / "config.json").read_text(encoding="utf-8"))


def test_a_model_and_a_data_set_train_by_their_names(hub: Hub, tmp_path: Path) -> None:
    data_commit = hub.commit(DATA, {"train.jsonl": rows(*QUESTIONS)})
    train(config(tmp_path, data={"path": "org/sums"}))
    commit = hub.heads[MODEL]
    assert recorded(tmp_path)["model"]["hub"] == f"org/tiny@{commit}"
    assert recorded(tmp_path)["data"]["hub"] == f"org/sums@{data_commit}"
    card = (tmp_path / "run" / "latest" / "policy" / "README.md").read_text(encoding="utf-8")
    assert "\nbase_model: org/tiny\n" in card
    assert f"from `org/tiny@{commit}`" in card
    assert str(tmp_path) not in card


def test_only_the_files_that_a_model_needs_are_downloaded(hub: Hub, weights: Files) -> None:
    local_model("org/tiny")
    wanted = {name for name, content in weights.items() if content != b"unwanted" and not name.endswith(".py")}
    assert sorted(hub.downloaded()) == sorted(wanted)
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= wanted


def test_a_resumed_run_keeps_its_commits_when_the_branches_move(hub: Hub, tmp_path: Path, weights: Files) -> None:
    hub.commit(DATA, {"train.jsonl": rows(*QUESTIONS)})
    names = {"data": {"path": "org/sums"}, "model": {"path": "org/tiny@main"}}
    train(config(tmp_path, **names))
    before = recorded(tmp_path)
    newer = hub.commit(MODEL, weights | files_in(tiny_model(tmp_path / "other", seed=1)))
    hub.commit(DATA, {"train.jsonl": rows("x", "y", "z")})
    snapshot = Path(before["model"]["path"])
    (snapshot / "trainer_state.json").write_text("{}")  # as a download of the whole repository leaves it
    train(config(tmp_path, steps=2, **names), resume=True)
    after = recorded(tmp_path)
    for section in ("model", "data"):
        assert after[section] == before[section]
    assert local_model("org/tiny@main")[1] == f"org/tiny@main@{newer}"  # a new run has the new one
    with pytest.raises(ConfigError, match=r"the files in model\.path differ from those of the run"):
        train(config(tmp_path, steps=3, **names | {"model": {"path": f"org/tiny@{newer}"}}), resume=True)


def test_a_local_folder_is_preferred_without_a_request(hub: Hub, tmp_path: Path) -> None:
    tiny_model(tmp_path / "org" / "tiny")
    (tmp_path / "org" / "sums").write_bytes(rows("a"))
    assert local_model("org/tiny") == ("org/tiny", None)
    assert local_data("org/sums") == ("org/sums", None)
    train(config(tmp_path))
    assert hub.requests == []
    assert recorded(tmp_path)["model"]["hub"] is None


def test_names_are_resolved_once(hub: Hub, tmp_path: Path) -> None:
    found = from_hub(config(tmp_path))
    asked = len(hub.requests)
    assert from_hub(found) == found
    assert len(hub.requests) == asked


def test_an_interrupted_download_continues(hub: Hub, weights: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.refuses.add("model.safetensors")
    with pytest.raises(HubError, match=r"the download of .*org/tiny.* failed \(.*503.*\): start again"):
        local_model("org/tiny")
    first = set(hub.downloaded()) - {"model.safetensors"}
    hub.requests.clear()
    hub.refuses.clear()
    hub.cut["model.safetensors"] = 1000  # the connection is lost once more
    monkeypatch.setattr(file_download.time, "sleep", lambda seconds: None)
    folder, _ = local_model("org/tiny")
    assert hub.downloaded().count("model.safetensors") == 2
    assert first.isdisjoint(hub.downloaded())
    assert (Path(folder) / "model.safetensors").read_bytes() == weights["model.safetensors"]


def test_offline_a_complete_cache_is_enough(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.commit(DATA, {"train.jsonl": rows("a"), "test.jsonl": rows("b")})
    online = local_model("org/tiny"), local_data("org/sums:test")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    hub.requests.clear()
    assert (local_model("org/tiny"), local_data("org/sums:test")) == online
    assert hub.requests == []
    with pytest.raises(HubError, match=r"run hf download org/sums --repo-type dataset --revision \w{40} on a machine"):
        local_data("org/sums:train")  # which was not downloaded
    with pytest.raises(HubError, match=r"HF_HUB_OFFLINE is set: unset it, or run hf download org/tiny --revision v1 o"):
        local_model("org/tiny@v1")


def test_without_a_connection_the_cache_is_used_or_the_network_named(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    local_model("org/tiny")
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")  # where nobody listens
    assert local_model("org/tiny")[1] == f"org/tiny@{hub.heads[MODEL]}"
    with pytest.raises(HubError, match=r"the hub cannot be reached \(.*\): check the name, the network, the proxy"):
        local_model("org/other")


@pytest.mark.parametrize(
    ("find", "name", "said"),
    [
        (local_model, "org/tinny", r"no org/tinny on this machine, and no model of this name on the Hugging"),
        (local_data, "org/none", r"no data set of this name on the Hugging Face hub: correct the name, or"),
        (local_model, "org/tiny@v9", r"has no revision v9: give a branch, a tag or a commit that it has"),
        (local_model, "org/a--b", r"the download of the model org/a--b .* failed \("),
        (local_model, "org/old", r"org/old .* has no \*\.safetensors file, and tlt reads no other weights: give"),
    ],
)
def test_names_that_lead_to_nothing(hub: Hub, weights: Files, find: Any, name: str, said: str) -> None:
    hub.commit("models/org/old", {"config.json": weights["config.json"], "pytorch_model.bin": b"pickle"})
    with pytest.raises(HubError, match=said):
        find(name)
    assert "pytorch_model.bin" not in hub.downloaded()


def test_a_gated_model_needs_a_token(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.gated.add(MODEL)
    with pytest.raises(HubError, match=r"is gated: accept its licence on its page, and set HF_TOKEN"):
        local_model("org/tiny")
    monkeypatch.setenv("HF_TOKEN", "good")
    assert (Path(local_model("org/tiny")[0]) / "config.json").is_file()


def card(*configs: dict[str, Any]) -> Files:
    """Return the card of a data set with these subsets, in JSON, which is YAML too."""
    return {"README.md": f"---\nconfigs: {json.dumps(configs)}\n---\n".encode()}


def subset(name: str, **splits: Any) -> dict[str, Any]:
    return {"config_name": name, "data_files": [{"split": split, "path": path} for split, path in splits.items()]}


def with_names(*files: str) -> Files:
    """Return files whose only question is the name of the file."""
    return {file: rows(file) for file in files}


def questions(name: str) -> list[str]:
    return [row["question"] for _, row in read_rows(local_data(name)[0])]


NAMED = {f"{part}/{split}-0.jsonl": rows(f"{part} {split}") for part in ("main", "hard") for split in ("train", "test")}
NAMED |= card(*(subset(part, train=f"{part}/train-*", test=f"{part}/test-*") for part in ("hard", "main")))
DESCRIBED = with_names("x/a1.jsonl", "x/a2.jsonl", "x/b.jsonl", "x/c/d.jsonl", "x/c/e/f.jsonl")
EASY = subset("easy", train=["x/b.jsonl", "x/a*.jsonl"], held_out="x/c/**")
DESCRIBED |= card(EASY, {"config_name": "all", "data_files": "x/**"}, subset("last", held_out="x/b.jsonl"))
TEST_FIRST = DESCRIBED | card(subset("main", test="x/b.jsonl", train="x/a1.jsonl"))
PLAIN = {"data/train-1.jsonl": rows("two"), "data/train-0.jsonl": rows("one"), "data/test.jsonl": rows("three")}
MANY = {f"data/train-{number:05}.jsonl": rows(f"part {number}") for number in range(12)}
CHOICES = {
    "twelve files": (MANY, "", [f"part {number}" for number in range(12)]),
    "subset and split": (NAMED, ":main/test", ["main test"]),
    "a subset without a split": (NAMED, ":hard", ["hard train"]),
    "train by default, in the order of names": (PLAIN, "", ["one", "two"]),
    "train by default, though the card names another first": (TEST_FIRST, "", ["x/a1.jsonl"]),
    "a split alone": (PLAIN, ":test", ["three"]),
    "the card's order": (DESCRIBED, ":easy/train", ["x/b.jsonl", "x/a1.jsonl", "x/a2.jsonl"]),
    "the card's split": (DESCRIBED, ":easy/held_out", ["x/c/d.jsonl", "x/c/e/f.jsonl"]),
    "a card's subset without splits": (DESCRIBED, ":all", sorted(DESCRIBED.keys() - {"README.md"})),
    "the only split of a subset": (DESCRIBED, ":last", ["x/b.jsonl"]),
    "one file": ({"limo.jsonl": rows("x"), "notes.txt": b""}, "", ["x"]),
    "at a revision": (PLAIN, ":default/test@main", ["three"]),
}


@pytest.mark.parametrize("case", CHOICES)
def test_subset_and_split(hub: Hub, case: str) -> None:
    files, choice, expected = CHOICES[case]
    commit = hub.commit(DATA, files)
    assert questions(f"org/sums{choice}") == expected
    assert local_data(f"org/sums{choice}")[1] == f"org/sums{choice}@{commit}"
    assert len([file for file in hub.downloaded() if file != "README.md"]) == len(expected)


FILES = ("archive/train.jsonl", "data/test-0.jsonl", "data/train-0.jsonl", "data/x/train-1.jsonl", "test.jsonl")
FILES = (*FILES, "train.jsonl")


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("*.jsonl", ["test.jsonl", "train.jsonl"]),
        ("train*", ["train.jsonl"]),
        ("data/*.jsonl", ["data/test-0.jsonl", "data/train-0.jsonl"]),
        ("data/train-*", ["data/train-0.jsonl"]),
        ("**/train*.jsonl", ["archive/train.jsonl", "data/train-0.jsonl", "data/x/train-1.jsonl", "train.jsonl"]),
        ("data/**", ["data/test-0.jsonl", "data/train-0.jsonl", "data/x/train-1.jsonl"]),
        ("./train.jsonl", ["train.jsonl"]),
        ("*/train.jsonl", ["archive/train.jsonl"]),
    ],
)
def test_a_pattern_of_a_card_matches_what_datasets_matches(hub: Hub, pattern: str, expected: list[str]) -> None:
    hub.commit(DATA, with_names(*FILES) | card(subset("default", train=pattern)))
    assert sorted(questions("org/sums")) == expected


@pytest.mark.parametrize(
    "splits",
    [
        {"train": ["train.jsonl"], "test": ["test.jsonl"], "": ["notes.jsonl", ".old/train.jsonl", "metadata.json"]},
        {"train": ["en/train.jsonl", "fr/train.jsonl"]},
        {"train": ["train/train.jsonl"], "validation": ["validation/validation.jsonl"]},  # each once
        {"train": ["train/val_0.jsonl"], "validation": ["val/train_1.jsonl"]},  # a folder's name comes first
        {"train": ["data/train-00000-of-00001.jsonl"], "hard": ["data/hard-00000-of-00001.jsonl"]},
    ],
)
def test_without_a_card_names_define_the_splits_as_in_datasets(hub: Hub, splits: dict[str, list[str]]) -> None:
    """The files under the empty name are in no split, because others are named like one."""
    hub.commit(DATA, with_names(*(file for files in splits.values() for file in files)))
    splits.pop("", None)
    assert {split: questions(f"org/sums:{split}") for split in splits} == splits
    with pytest.raises(HubError, match=rf"has the splits {', '.join(f'default/{split}' for split in splits)}: give"):
        local_data("org/sums:other")


def test_a_card_cannot_name_files_of_this_machine(hub: Hub, tmp_path: Path) -> None:
    (tmp_path / "own.jsonl").write_bytes(rows("secret"))
    hub.commit(DATA, with_names("train.jsonl") | card(subset("default", train=str(tmp_path / "*.jsonl"))))
    with pytest.raises(HubError, match=r"org/sums .* has .*/own\.jsonl in this split, but .* of the data set itself"):
        local_data("org/sums")


@pytest.mark.parametrize("case", CHOICES)
def test_the_rows_are_those_that_datasets_loads(hub: Hub, tmp_path: Path, case: str) -> None:
    files, choice, expected = CHOICES[case]
    for file, content in files.items():
        place = tmp_path / "copy" / file
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(content)
    names = datasets.get_dataset_config_names(str(tmp_path / "copy"))
    subset, _, split = choice.partition("@")[0][1:].partition("/")
    if not split and subset not in names:
        subset, split = "default" if "default" in names else names[0], subset
    loaded: Any = datasets.load_dataset(str(tmp_path / "copy"), subset, cache_dir=str(tmp_path / "cache"))
    rows = loaded[split or ("train" if "train" in loaded else min(loaded))]
    assert list(rows["question"]) == expected


def test_other_files_of_the_same_commit_are_not_left_from_another_choice(hub: Hub) -> None:
    hub.commit(DATA, DESCRIBED)
    assert len(questions("org/sums:all")) == 5
    assert questions("org/sums:last") == ["x/b.jsonl"]


def test_an_unknown_subset_or_split_is_an_error_that_names_all(hub: Hub) -> None:
    hub.commit(DATA, NAMED)
    for choice in ("", ":other/test", ":test"):
        with pytest.raises(HubError, match=r"has the subsets hard, main: give one of these, such as org/sums:hard$"):
            local_data(f"org/sums{choice}")
    with pytest.raises(HubError, match=r"has the splits main/train, main/test: give one of these, such as org/sums:m"):
        local_data("org/sums:main/validation")


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ({}, r"cannot be read by datasets: The directory at the data set doesn't contain any data files"),
        (with_names("sums.py", "train.jsonl"), r"Dataset scripts are no longer supported, but found sums\.py"),
        (
            with_names("train.csv"),
            r"org/sums .* has train\.csv in this split, but tlt reads only \.jsonl, .* of the data set itself: c",
        ),
        (
            with_names("train.jsonl") | card(subset("default", train="train.jsonl") | {"field": "rows"}),
            r"org/sums .* has field = 'rows' on its card, which tlt does not apply: load it with datasets, save",
        ),
        (
            {"train.parquet": b""} | card(subset("default", train="*.parquet") | {"filters": [["level", ">", 1]]}),
            r"org/sums .* has filters = \[\['level', '>', 1\]\] on its card, which tlt does not apply",
        ),
        (with_names("a.jsonl") | {"README.md": b"---\nconfigs: [3]\n---"}, r"org/sums .* cannot be read by datasets"),
    ],
)
def test_a_data_set_that_cannot_be_used_is_an_error_of_one_sentence(hub: Hub, files: Files, said: str) -> None:
    hub.commit(DATA, files)
    with pytest.raises(HubError, match=said) as error:
        local_data("org/sums")
    assert "\n" not in str(error.value)


def test_held_out_prompts_have_a_name_too(hub: Hub, tmp_path: Path) -> None:
    commit = hub.commit(DATA, NAMED)
    found = from_hub(config(tmp_path, data={"path": "org/sums:main"}, eval={"every": 1, "path": "org/sums:main/test"}))
    assert found.eval.hub == f"org/sums:main/test@{commit}"
    held_out = found.data.model_copy(update={"path": found.eval.path})
    assert [prompt.text for prompt in load_prompts(held_out, lambda text: [1])] == ["main test"]


def test_a_first_try_needs_no_recipe(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.commit(DATA, NAMED)
    configs: list[Config] = []
    monkeypatch.setattr("tlt.run.train.train", lambda config, *rest, **more: configs.append(from_hub(config)) or {})
    monkeypatch.setattr("tlt.run.display.closing", lambda summary, folder: [])
    names = ["--model", "org/tiny", "--data", "org/sums:hard", "--reward", "exact", "--rollout.max_new_tokens", "64"]
    for words in (names, [*names, "--train.steps", "3"], ["--train.steps", "3", *names]):
        assert exit_code(["train", *words]) == 0
    assert [config.train.steps for config in configs] == [100, 3, 3]
    assert configs[0].model.hub == f"org/tiny@{hub.heads[MODEL]}"
    assert configs[0].data.hub == f"org/sums:hard@{hub.heads[DATA]}"
    assert configs[0].reward.name == "exact"


def test_a_recipe_may_follow_an_option(hub: Hub, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["--train.steps", "3", "none.toml"], ["none.toml", "--train.steps", "3"], ["--force=x", "none.toml"]):
        exit_code(["train", *words])
    said = "tlt: there is no recipe at none.toml: give the path of a TOML file, such as recipes/quickstart.toml"
    assert capsys.readouterr().err.splitlines()[:2] == [said] * 2
    exit_code(["train", "--model", "org/tiny"])
    assert capsys.readouterr().err == "tlt: give a recipe, or --model NAME --data NAME --reward NAME\n"


def test_generate_downloads_a_model_by_its_name(hub: Hub, capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code(["generate", "org/tiny", "--prompt", "a", "--rollout.max_new_tokens", "2"]) == 0
    assert "2 tokens in" in capsys.readouterr().out

"""The tokenizer used in training is that of tokenizer.json, even if transformers builds another one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tiny import save_weights
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import AutoTokenizer, Qwen2Config

from tlt.config import DataConfig
from tlt.data.prompts import DataError, encoder
from tlt.data.tokenizer import load_tokenizer, model_files, write_files
from tlt.files import read_json
from tlt.models.model_folder import ModelError
from tlt.spelling import Detokenizer


def a_tokenizer() -> Tokenizer:
    vocab = {char: i for i, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    found = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    found.normalizer = normalizers.NFC()
    found.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    found.decoder = decoders.ByteLevel()
    found.add_special_tokens([AddedToken("<eos>", normalized=False), AddedToken("<bos>", normalized=False)])
    return found


def a_folder(folder: Path, tokenizer: Tokenizer, **config: Any) -> Path:
    """Return a folder of the family qwen2, for which transformers 5 always builds Qwen2Tokenizer."""
    Qwen2Config(vocab_size=300).save_pretrained(folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    given = {"tokenizer_class": "Qwen2Tokenizer", "eos_token": "<eos>", **config}
    (folder / "tokenizer_config.json").write_text(json.dumps(given))
    return folder


def carried(source: Path, folder: Path) -> Path:
    """Return a folder with the model files of a checkpoint."""
    folder.mkdir()
    (folder / "config.json").write_bytes((source / "config.json").read_bytes())
    write_files(model_files(source, load_tokenizer(source)), folder)
    return folder


@pytest.mark.parametrize(
    ("part", "other"),
    [
        ("normalizer", normalizers.Lowercase()),
        ("pre_tokenizer", pre_tokenizers.ByteLevel(add_prefix_space=True, use_regex=False)),
        ("decoder", decoders.Fuse()),
    ],
)
def test_a_tokenizer_that_differs_from_its_file_is_replaced_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, part: str, other: Any
) -> None:
    words = a_tokenizer()
    setattr(words, part, other)
    folder, text = a_folder(tmp_path / "model", words), "Two  Words<eos> é"
    found = load_tokenizer(folder)
    assert "as a Qwen2Tokenizer that differs from tokenizer.json" in caplog.text
    theirs = AutoTokenizer.from_pretrained(folder)
    assert any(
        theirs(t)["input_ids"] != words.encode(t).ids
        or theirs.decode(words.encode(t).ids) != words.decode(words.encode(t).ids)
        for t in ("TWO", "é")
    )
    ids = words.encode(text).ids
    assert found(text)["input_ids"] == ids
    assert Detokenizer(found)(ids) == words.decode(ids)
    assert (found.eos_token_id, len(found)) == (words.token_to_id("<eos>"), words.get_vocab_size())
    again = carried(folder, tmp_path / "again")
    assert (again / "tokenizer.json").read_bytes() == (folder / "tokenizer.json").read_bytes()
    assert read_json(again / "tokenizer_config.json")["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert load_tokenizer(again)(text)["input_ids"] == ids


def test_lengths_in_the_file_neither_truncate_nor_pad(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    words = a_tokenizer()
    words.enable_truncation(3)
    words.enable_padding(length=8, pad_token="<eos>", pad_id=words.token_to_id("<eos>"))
    found = load_tokenizer(a_folder(tmp_path, words))
    assert [len(found(text)["input_ids"]) for text in ("a", "a long text")] == [1, 11]
    assert "tokenizer.json" not in caplog.text


FLAGS = dict.fromkeys(("lstrip", "rstrip", "single_word", "normalized", "special"), False)


def test_tokens_added_by_tokenizer_config_are_used(tmp_path: Path) -> None:
    words = a_tokenizer()
    size = words.get_vocab_size()
    folder = a_folder(tmp_path / "model", words, added_tokens_decoder={str(size): FLAGS | {"content": "<think>"}})
    for place in (folder, carried(folder, tmp_path / "again")):
        assert load_tokenizer(place)("a<think>")["input_ids"][1:] == [size]


def test_flags_of_tokenizer_config_are_used_with_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Phi-3 has such flags, and all versions of transformers read them."""
    words = a_tokenizer()
    flags = FLAGS | {"content": "<eos>", "rstrip": True, "special": True}
    folder = a_folder(tmp_path, words, added_tokens_decoder={str(words.token_to_id("<eos>")): flags})
    found = load_tokenizer(folder)
    assert "changes tokenizer.json, and tlt uses both" in caplog.text
    assert len(found("a<eos> \n")["input_ids"]) == 2


def test_a_prompt_that_ends_with_the_end_token_is_refused(tmp_path: Path) -> None:
    words = a_tokenizer()
    end = ("<eos>", words.token_to_id("<eos>"))
    words.post_processor = processors.TemplateProcessing(single="$A <eos>", special_tokens=[end])
    found = load_tokenizer(a_folder(tmp_path, words, chat_template="{{ messages[0]['content'] }}"))
    with pytest.raises(DataError, match=r"appends <eos> to every text.*post_processor in tokenizer\.json"):
        encoder(found, DataConfig(path="p.jsonl"))
    assert len(encoder(found, DataConfig(path="p.jsonl", chat=True))("ab")) == 2, "a template has its own tokens"


def test_fields_that_one_transformers_reads_are_corrected(tmp_path: Path) -> None:
    words = a_tokenizer()
    begin = ("<bos>", words.token_to_id("<bos>"))
    words.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[begin])
    folder = a_folder(tmp_path / "model", words, add_bos_token=False, bos_token="<bos>")
    assert load_tokenizer(folder)("a")["input_ids"][0] == words.token_to_id("<bos>")
    assert read_json(carried(folder, tmp_path / "again") / "tokenizer_config.json")["add_bos_token"] is True


def test_spaces_are_not_cleaned_up(tmp_path: Path) -> None:
    words = Tokenizer(models.WordLevel({"<eos>": 0, "hello": 1, ",": 2, "you": 3}, unk_token="<eos>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    folder = a_folder(tmp_path, words, tokenizer_class="PreTrainedTokenizerFast", clean_up_tokenization_spaces=True)
    assert Detokenizer(load_tokenizer(folder))([1, 2, 3]) == "hello , you"


@pytest.mark.parametrize("where", ["file", "config", "both"])
def test_a_chat_template_is_where_each_version_of_transformers_reads_it(tmp_path: Path, where: str) -> None:
    """chat_template.jinja is preferred if there are both."""
    folder = a_folder(tmp_path / "model", a_tokenizer())
    if where != "config":
        (folder / "chat_template.jinja").write_text("new")
    if where != "file":
        config = read_json(folder / "tokenizer_config.json")
        (folder / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": "old"}))
    again, said = carried(folder, tmp_path / "again"), "old" if where == "config" else "new"
    assert (again / "chat_template.jinja").read_text() == said
    assert read_json(again / "tokenizer_config.json")["chat_template"] == said


def test_several_chat_templates_are_kept(tmp_path: Path) -> None:
    templates = [{"name": "default", "template": "one"}, {"name": "tool_use", "template": "two"}]
    again = carried(a_folder(tmp_path / "model", a_tokenizer(), chat_template=templates), tmp_path / "again")
    assert load_tokenizer(again).chat_template == {"default": "one", "tool_use": "two"}
    assert read_json(again / "tokenizer_config.json")["chat_template"] == templates


def test_files_of_several_chat_templates_are_copied(tmp_path: Path) -> None:
    folder = a_folder(tmp_path / "model", a_tokenizer())
    (folder / "additional_chat_templates").mkdir()
    names = ("chat_template.jinja", "additional_chat_templates/tool_use.jinja")
    for name in names:
        (folder / name).write_text(f"{name}\r\n")
    again = carried(folder, tmp_path / "again")
    assert all((again / name).read_bytes() == (folder / name).read_bytes() for name in names)
    assert load_tokenizer(again).chat_template.keys() == {"default", "tool_use"}


def test_extra_special_tokens_have_the_name_that_all_versions_read(tmp_path: Path) -> None:
    folder = a_folder(tmp_path / "model", a_tokenizer(), extra_special_tokens=["<bos>"])
    again = carried(folder, tmp_path / "again")
    config = read_json(again / "tokenizer_config.json")
    assert "extra_special_tokens" not in config
    assert config["additional_special_tokens"] == ["<bos>"]
    assert load_tokenizer(again).extra_special_tokens == ["<bos>"]


def test_complete_files_are_copied_byte_for_byte(tmp_path: Path) -> None:
    folder = a_folder(tmp_path / "model", a_tokenizer())
    (folder / "generation_config.json").write_text('{ "temperature": 0.6 }')
    (folder / "vocab.json").write_text("{}")
    (folder / "tokenization_own.py").touch()
    again = carried(folder, tmp_path / "again")
    names = {"config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json", "vocab.json"}
    assert {file.name for file in again.iterdir()} == names
    assert all((again / name).read_bytes() == (folder / name).read_bytes() for name in names)


def test_a_folder_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="has no tokenizer: copy"):
        load_tokenizer(save_weights(tmp_path))

"""Prompts from files and from reasoning-gym, and the cursor that returns each prompt once per epoch."""

from __future__ import annotations

import gzip
import json
import lzma
import re
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import datasets
import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tlt.config import DataConfig, EvalConfig
from tlt.data.prompts import Cursor, DataError, encoder, load_held_out, load_prompts, make_cursor, task_dataset
from tlt.types import Prompt


def encode(text: str) -> list[int]:
    return list(text.encode())


def write(folder: Path, *lines: str) -> str:
    path = folder / "rows.jsonl"
    path.write_text("\n".join(lines), encoding="utf-8")
    return str(path)


def load(folder: Path, *lines: str, **options: Any) -> list[Prompt]:
    return load_prompts(DataConfig(path=write(folder, *lines), **options), encode)


def refusal(folder: Path, *lines: str, **options: Any) -> str:
    with pytest.raises(DataError) as error:
        load(folder, *lines, **options)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_rows_become_prompts_in_order(tmp_path: Path) -> None:
    prompts = load(tmp_path, '{"question": "one", "answer": "1"}', '{"question": "two", "answer": "2", "more": [3]}')
    assert [p.text for p in prompts] == ["one", "two"]
    assert [p.prompt_id for p in prompts] == [0, 1]
    assert prompts[0].token_ids == tuple(b"one")
    assert prompts[1].data == {"question": "two", "answer": "2", "more": [3]}
    text = "line\u2028separator, next\u0085line, é, 数"  # str.splitlines would break here
    assert [p.text for p in load(tmp_path, json.dumps({"question": text}, ensure_ascii=False))] == [text]


def test_columns_and_template_come_from_the_configuration(tmp_path: Path) -> None:
    row = '{"problem": "1 {question} 1", "solution": 2}'
    options = {"prompt_column": "problem", "answer_column": "solution", "template": "Q: {question}\nA:"}
    (prompt,) = load(tmp_path, row, **options)
    assert prompt.text == "Q: 1 {question} 1\nA:"
    assert prompt.data["answer"] == 2


NO_TEXT = "has neither text nor messages under 'question'"


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        *((text, "is not JSON") for text in ('{"question": "a"', "just text")),
        *((text, NO_TEXT) for text in ('["question", "a"]', '{"question": 3}', '{"question": null}')),
        ('{"prompt": "a", "id": 3}', f"{NO_TEXT}: set data.prompt_column to one of its columns, prompt, id"),
    ],
)
def test_a_bad_row_is_named_by_file_and_line(tmp_path: Path, bad: str, said: str) -> None:
    """Blank lines are skipped and counted."""
    message = refusal(tmp_path, '{"question": "fine"}', "", bad)
    assert f"{tmp_path / 'rows.jsonl'}, line 3 {said}" in message


def test_a_prompt_at_the_limit_is_accepted_and_a_longer_one_refused(tmp_path: Path) -> None:
    rows = ('{"question": "1234567"}', '{"question": "12345678"}')
    assert len(load(tmp_path, *rows, max_prompt_tokens=8)) == 2
    said = refusal(tmp_path, *rows, max_prompt_tokens=7)
    assert "prompt 1 has 8 tokens, more than data.max_prompt_tokens = 7" in said


def tasks(*specs: dict[str, Any], size: int = 30, **options: Any) -> DataConfig:
    return DataConfig.model_validate({"tasks": list(specs), "size": size, **options})


@pytest.mark.parametrize(
    ("specs", "named"),
    [
        ([{"name": "no_such_task"}], "no_such_task"),
        ([{"name": "chain_sum", "params": {"no_such_parameter": 1}}], "no_such_parameter"),
        ([{"name": "chain_sum", "params": {"min_terms": 5, "max_terms": 2}}], "chain_sum"),
    ],
)
def test_errors_of_reasoning_gym_become_one_sentence(specs: list[dict[str, Any]], named: str) -> None:
    with pytest.raises(DataError) as error:
        task_dataset(tasks(*specs), stage=0)
    assert named in str(error.value)
    assert "data.tasks" in str(error.value)
    assert "\n" not in str(error.value)


def test_a_task_without_reasoning_gym_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(DataError, match=r"pip install 'tlt-rl\[tasks\]'"):
        task_dataset(tasks({"name": "gcd"}), stage=0)


HARDER = [
    {"name": "chain_sum", "params": {"min_terms": 2, "max_terms": 2}},
    {"name": "chain_sum", "stage": 2, "params": {"min_terms": 6, "max_terms": 6}},
    {"name": "gcd", "stage": 1, "weight": 2.0},
]


def test_stages_share_the_prompts_by_weight_and_keep_their_own_parameters() -> None:
    prompts = load_prompts(tasks(*HARDER, size=40), encode)
    assert [p.data["stage"] for p in prompts] == [0] * 10 + [1] * 20 + [2] * 10
    assert {p.data["entry"]["metadata"]["num_terms"] for p in prompts[:10]} == {2}
    assert {p.data["entry"]["metadata"]["num_terms"] for p in prompts[30:]} == {6}


def test_the_first_epoch_goes_through_the_stages_and_later_ones_mix_them() -> None:
    config = tasks(*HARDER, size=40)
    cursor = make_cursor(config, load_prompts(config, encode), seed=1)
    rows = [row for row, _ in cursor.take(40)]
    assert sorted(rows) == list(range(40)) != rows
    assert [set(rows[:10]), set(rows[10:30])] == [set(range(10)), set(range(10, 30))]
    later = [row for row, _ in cursor.take(40)]
    assert sorted(later) == list(range(40))
    assert set(later[:10]) != set(range(10))


def test_dropped_prompts_do_not_mix_the_stages_of_the_first_epoch() -> None:
    hard, easy = HARDER[1] | {"stage": 0}, HARDER[0] | {"stage": 1}
    sizes = sorted(len(prompt.token_ids) for prompt in load_prompts(tasks(hard, easy), encode))
    config = tasks(hard, easy, max_prompt_tokens=sizes[20], long_prompts="drop")
    prompts = load_prompts(config, encode)
    stages = [prompts[row].data["stage"] for row, _ in make_cursor(config, prompts, seed=1).take(len(prompts))]
    assert stages == sorted(stages)
    assert (0 < stages.count(0) < 15, stages.count(1)) == (True, 15)


def test_held_out_prompts_of_tasks_are_not_training_prompts() -> None:
    config = tasks({"name": "count_bits", "params": {"min_n": 1, "max_n": 300}}, size=200)
    training = load_prompts(config, encode)
    held_out, again = (load_held_out(config, EvalConfig(every=1, size=50), encode, training) for _ in range(2))
    assert (held_out, len(held_out)) == (again, 50)
    assert not {p.text for p in held_out} & {p.text for p in training}


def test_held_out_prompts_come_from_all_stages() -> None:
    config = tasks(*HARDER, size=8)
    held_out = load_held_out(config, EvalConfig(every=1, size=20), encode, load_prompts(config, encode))
    assert [[p.data["stage"] for p in held_out].count(stage) for stage in range(3)] == pytest.approx([5, 10, 5], abs=1)


def test_held_out_prompts_are_evenly_spaced_in_a_file(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = DataConfig(path=write(tmp_path, '{"question": "seen"}'))
    (tmp_path / "held_out.jsonl").write_text("\n".join(f'{{"question": "{q}"}}' for q in ("seen", *"abcdef")))
    held_out = EvalConfig(every=1, size=3, path=str(tmp_path / "held_out.jsonl"))
    assert [p.text for p in load_held_out(config, held_out, encode, load_prompts(config, encode))] == ["a", "c", "e"]
    assert f"1 of 7 prompts of {held_out.path} are left out of evaluations" in caplog.text
    with pytest.raises(DataError, match="there are no held-out prompts"):
        load_held_out(config, EvalConfig(every=1, path=config.path), encode, load_prompts(config, encode))


def test_an_error_in_held_out_prompts_names_them(tmp_path: Path) -> None:
    held_out = EvalConfig(every=1, path=write(tmp_path, '{"question": "too long"}'))
    with pytest.raises(DataError, match=r"^held-out prompts: prompt 0 has 8 tokens"):
        load_held_out(DataConfig(path="-", max_prompt_tokens=4), held_out, encode, [])


def test_an_array_and_several_files_are_read_in_the_order_of_their_names(tmp_path: Path) -> None:
    (tmp_path / "b.json").write_text('[{"question": "two"}, {"question": "three"}]', encoding="utf-8")
    (tmp_path / "a.jsonl").write_text('{"question": "one"}\n', encoding="utf-8")
    (tmp_path / "notes.txt").write_text("no rows", encoding="utf-8")
    assert texts(tmp_path / "*.json*") == ["one", "two", "three"]


def texts(path: Path | str) -> list[str]:
    return [prompt.text for prompt in load_prompts(DataConfig(path=str(path)), encode)]


def saved(folder: Path, *questions: str, shards: int = 1) -> Path:
    """Save a data set to disk, with each question in a row."""
    rows = datasets.Dataset.from_list([{"question": each, "answer": each[0]} for each in questions])
    rows.save_to_disk(folder, num_shards=shards)
    return folder


def test_a_data_set_that_was_saved_to_disk(tmp_path: Path) -> None:
    folder = saved(tmp_path / "saved", "one", "two", "three", shards=2)
    assert texts(folder) == ["one", "two", "three"]
    datasets.load_from_disk(str(folder)).select([2, 0]).save_to_disk(tmp_path / "some")
    assert texts(tmp_path / "some") == ["three", "one"]
    (folder / "data-00001-of-00002.arrow").write_bytes(b"no arrow")
    with pytest.raises(DataError, match=r"saved is not a data set that can be read \(.*\): save it again"):
        texts(folder)


def test_a_data_set_of_several_splits_needs_the_name_of_one(tmp_path: Path) -> None:
    splits = {split: datasets.Dataset.from_list([{"question": split}]) for split in ("train", "test")}
    datasets.DatasetDict(splits).save_to_disk(tmp_path)
    assert texts(tmp_path / "test") == ["test"]
    with pytest.raises(DataError, match=r"a data set for each split: give one of .*/train, .*/test$"):
        texts(tmp_path)


@pytest.mark.parametrize(
    ("names", "patterns"),
    [
        (("test-00000-of-00001.jsonl", "train-00000-of-00001.jsonl"), ("test-*-of-*.jsonl", "train-*-of-*.jsonl")),
        (("gsm8k_train.jsonl", "gsm8k_val.jsonl"), ("gsm*k_train.jsonl", "gsm*k_val.jsonl")),
        (("notes.jsonl", "train0.jsonl", "train1.jsonl"), ("notes.jsonl", "train*.jsonl")),
    ],
)
def test_a_folder_with_different_files_is_refused(
    tmp_path: Path, names: tuple[str, ...], patterns: tuple[str, ...]
) -> None:
    for name in names:
        (tmp_path / name).write_text(json.dumps({"question": name}), encoding="utf-8")
    given = ", ".join(f"{tmp_path}/{pattern}" for pattern in patterns)
    with pytest.raises(DataError, match=rf"give one of {re.escape(given)}, or .*/\*\.jsonl for all"):
        texts(tmp_path)
    assert sorted(text for pattern in patterns for text in texts(tmp_path / pattern)) == sorted(names)
    assert texts(tmp_path / "*.jsonl") == sorted(names), "a pattern says which files are meant"


def test_the_numbered_files_of_a_folder_are_one_data_set(tmp_path: Path) -> None:
    names = ["train-00000-of-00002.jsonl", "train-00001-of-00002.jsonl"]
    for name in names:
        (tmp_path / name).write_text(json.dumps({"question": name}), encoding="utf-8")
    (tmp_path / "README.md").write_text("no rows", encoding="utf-8")
    (tmp_path / "._test.jsonl").write_bytes(b"\x00\x05\x16\x07Mac OS X")
    assert texts(tmp_path) == names


LINES = b'{"question": "one"}\r\n{"question": "zwei \xe2\x80\x93"}\r\n'


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("rows.jsonl", b"\xef\xbb\xbf" + LINES),
        ("rows.json", b"\xef\xbb\xbf[" + LINES.replace(b"}\r\n{", b"},\r\n{") + b"]"),
        ("rows.jsonl.gz", gzip.compress(LINES, mtime=0)),
        ("rows.json.gz", gzip.compress(b"\xef\xbb\xbf" + LINES, mtime=0)),
        ("rows.txt", gzip.compress(LINES, mtime=0)),
    ],
)
def test_files_of_other_programs_are_read(tmp_path: Path, name: str, content: bytes) -> None:
    (tmp_path / name).write_bytes(content)
    assert texts(tmp_path / name) == ["one", "zwei –"]
    if not name.endswith("txt"):
        assert texts(tmp_path) == ["one", "zwei –"]


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("rows.jsonl", LINES.decode().encode("utf-16"), r"rows\.jsonl, line 1 is not JSON: it is UTF-16 .*as UTF-8$"),
        ("rows.jsonl", LINES.decode().encode("utf-16-be"), r"line 1 is not JSON: it is UTF-16 .*as UTF-8$"),
        ("rows.json", b'[{"question": "caf\xe9"}]', r"rows\.json is not JSON: byte 19 is not UTF-8: save the file as"),
        ("rows.jsonl.gz", gzip.compress(LINES, mtime=0)[:-9], r"rows\.jsonl\.gz is not a gzip file that can be read"),
        ("rows.jsonl.xz", lzma.compress(LINES), r"rows\.jsonl\.xz, line 1 is not JSON: byte 1 is not UTF-8"),
        ("rows.jsonl", b"", r"rows\.jsonl contains no prompts"),
        ("rows.jsonl", b"\xef\xbb\xbf\r\n", r"rows\.jsonl contains no prompts"),
    ],
)
def test_files_that_are_not_utf8_are_an_error_of_one_sentence(
    tmp_path: Path, name: str, content: bytes, said: str
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=said):
        texts(tmp_path / name)


def test_a_folder_without_data_files_is_an_error_that_names_its_files(tmp_path: Path) -> None:
    for name in ("rows.jsonl.zst", "a.csv"):
        (tmp_path / name).touch()
    said = r"contains no \.jsonl, .* file, but a\.csv, rows\.jsonl\.zst: unpack or convert"
    with pytest.raises(DataError, match=said):
        texts(tmp_path)


@pytest.mark.parametrize("name", ["task", "data_source"])
def test_many_task_names_turn_metrics_by_task_off(tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str) -> None:
    for count in (50, 51):
        prompts = load(tmp_path, *(json.dumps({"question": "q", name: f"Tell me of {i}."}) for i in range(count)))
        assert {prompt.counts_by_task for prompt in prompts} == {count == 50}
        assert prompts[3].task == "Tell me of 3."
        said = "has 51 different values of task or data_source: metrics by task are off"
        assert (said in caplog.text) == (count == 51)


def test_columns_may_be_nested_and_prompts_may_be_messages(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "what?"}]
    row = {"prompt": messages, "reward_model": {"style": "rule", "ground_truth": "72"}, "a.b": "dotted"}
    path, seen = write(tmp_path, json.dumps(row)), list[Any]()
    options = {"prompt_column": "prompt", "answer_column": "reward_model.ground_truth", "chat": True}
    (prompt,) = load_prompts(DataConfig(path=path, **options), lambda asked: (seen.append(asked), [1])[1])
    assert (seen, prompt.text, prompt.data["answer"]) == ([messages], "what?", "72")
    (plain,) = load_prompts(DataConfig(path=path, prompt_column="a.b"), encode)
    assert (plain.text, plain.data["answer"]) == ("dotted", None)
    with pytest.raises(DataError, match=r"neither text nor messages under 'reward_model'"):
        load_prompts(DataConfig(path=path, prompt_column="reward_model"), encode)


def test_a_missing_answer_column_is_an_error_that_names_the_columns(tmp_path: Path) -> None:
    path = write(tmp_path, json.dumps({"question": "a", "solution": "1"}), json.dumps({"question": "b", "level": 2}))
    with pytest.raises(
        DataError, match=r"nothing under data\.answer_column = 'gold': .* question, solution, level, or"
    ):
        load_prompts(DataConfig(path=path, answer_column="gold"), encode)
    with pytest.raises(DataError, match=r"nothing under data\.answer_column = 'answer'"):
        load_prompts(DataConfig(path=path, answer_column="answer"), encode)
    assert [prompt.ground_truth for prompt in load_prompts(DataConfig(path=path), encode)] == [None, None]
    path = write(tmp_path, json.dumps({"question": "a", "gold": "1"}), json.dumps({"question": "b"}))
    found = load_prompts(DataConfig(path=path, answer_column="gold"), encode)
    assert [prompt.ground_truth for prompt in found] == ["1", None]
    path = write(tmp_path, json.dumps({"question": "a", "ground_truth": "1"}))  # rewards get this column instead
    assert len(load_prompts(DataConfig(path=path, answer_column="answer"), encode)) == 1


def test_columns_with_names_of_tlt_are_kept(tmp_path: Path) -> None:
    row = {"question": "a", "solution": "1", "answer": "long", "entry": 2, "stage": 3, "prompt": "p", "response": "r"}
    config = DataConfig(path=write(tmp_path, json.dumps(row)), answer_column="solution", prefill="<think>")
    (prompt,) = load_prompts(config, encode)
    assert (prompt.data, prompt.ground_truth, prompt.prefill) == (row, "1", "<think>")


def test_long_prompts_may_be_dropped_and_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = write(tmp_path, *(json.dumps({"question": "x" * n}) for n in (3, 9, 4)))
    prompts = load_prompts(DataConfig(path=path, max_prompt_tokens=5, long_prompts="drop"), encode)
    assert [(p.prompt_id, p.text) for p in prompts] == [(0, "xxx"), (1, "xxxx")]
    assert "1 of 3 prompts" in caplog.text
    with pytest.raises(DataError, match="all prompts are longer than"):
        load_prompts(DataConfig(path=path, max_prompt_tokens=2, long_prompts="drop"), encode)


def test_errors_in_parquet_files_are_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "rows.parquet"
    path.write_bytes(b"PAR1 no more of it")
    with pytest.raises(DataError, match=r"rows\.parquet is not a Parquet file"):
        texts(path)
    pyarrow.parquet.write_table(pyarrow.table({"question": ["a", None]}), path)
    with pytest.raises(DataError, match=rf"rows\.parquet, row 1 {NO_TEXT}"):
        texts(path)
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(DataError, match=r"needs pyarrow: pip install 'tlt-rl\[data\]'"):
        texts(path)


class BeginsWithOne:
    """Tokenizer that puts its BOS token, number 1, before every text. `<s>` in a text is one too."""

    eos_token_id = None
    bos_token, bos_token_id = "<s>", 1

    def __call__(self, text: str) -> dict[str, list[int]]:
        return {"input_ids": [1, *(1 if part == "<s>" else 9 for part in re.findall("<s>|.", text))]}


def test_a_second_bos_token_is_dropped_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    encode = encoder(BeginsWithOne(), DataConfig(path="-"))
    assert [encode(text) for text in ("ab", "<s>ab", "a<s>", "<s>")] == [[1, 9, 9], [1, 9, 9], [1, 9, 1], [1]]
    encode("<s>again")
    assert caplog.text.count("both the prompts and the tokenizer add <s>") == 1


STAGED = tasks(*HARDER, size=40)
STAGES = make_cursor(STAGED, load_prompts(STAGED, encode), seed=1)
CURSORS = st.builds(Cursor, st.integers(1, 20), st.integers(0, 3), st.booleans())


@given(CURSORS | st.just(STAGES), st.lists(st.integers(1, 30), min_size=1, max_size=8))
def test_rows_come_once_per_epoch_with_any_batches_and_after_any_restore(begun: Cursor, batches: list[int]) -> None:
    taken, cursor = list[tuple[int, int]](), begun
    for count in batches:
        cursor = Cursor(**json.loads(json.dumps(asdict(cursor))))
        taken += cursor.take(count)
    assert taken == replace(begun).take(sum(batches))
    for start in range(0, len(taken), begun.size):
        rows = taken[start : start + begun.size]
        assert [epoch for _, epoch in rows] == [start // begun.size] * len(rows)
        assert len({row for row, _ in rows}) == len(rows)
        assert {row for row, _ in rows} <= set(range(begun.size))


def test_the_order_depends_on_seed_and_epoch() -> None:
    def order(seed: int, epoch: int) -> list[int]:
        return [row for row, e in Cursor(50, seed, True).take(100) if e == epoch]

    assert len({tuple(order(seed, epoch)) for seed in (0, 1) for epoch in (0, 1)}) == 4
    assert Cursor(3, 7, False).take(5) == [(0, 0), (1, 0), (2, 0), (0, 1), (1, 1)]

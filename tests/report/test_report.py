"""The page of a run: its numbers, and that it can be written in any state of the run's files."""

from __future__ import annotations

import json
import logging
import re
from pathlib import Path
from typing import Any

import pytest
from made_up_run import line, make_run
from tiny import read_completions, tiny_config, train

from tlt import cli
from tlt.report import ReportError, write_report, write_report_or_warn
from tlt.report import page as page_module
from tlt.report.page import FILES, advice, read_run, useful_share, worker_seconds


def shown(path: Path) -> dict[str, Any]:
    """Return the content of the page."""
    found = re.search('<script type="application/json" id="content">(.*?)</script>', path.read_text(encoding="utf-8"))
    assert found
    return json.loads(found[1], parse_constant=pytest.fail)


def test_the_page_has_the_verdict_on_speed(tmp_path: Path) -> None:
    """Steps 2, 4, 5 and 6 are compared: plain decoding takes 6 s, 6 s, 3 s and 6 s instead of 4 s."""
    page = shown(write_report(make_run(tmp_path / "run", steps=8)))
    gain = page["gain"]
    assert (gain["times"], gain["median"], gain["low"], gain["high"], gain["pairs"]) == (None, 1.5, 0.75, 1.5, 4)
    assert gain["verdict"] in page["sentences"][1]
    assert "no gain over plain decoding was measured (0.75 to 1.50 times in 4 steps)" in gain["verdict"]


def test_worker_seconds_sum_to_those_of_all_states(tmp_path: Path) -> None:
    found = read_run(make_run(tmp_path / "run", steps=8))
    seconds = worker_seconds(found)
    assert sum(seconds.values()) == pytest.approx(8 * 2 * 10)
    assert seconds["verify"] == pytest.approx(8)
    assert seconds["other decoding"] == pytest.approx(8 * 2 * 4 - 8 * 4)
    assert seconds["reward"] == pytest.approx(8 * 2 * 0.5)  # both workers wait for it
    assert seconds["idle"] == pytest.approx(8 * 2 * 1.5)
    assert useful_share(found) == pytest.approx((5 * 0.8 + 3 * 0.4) / 8)
    unknown = with_lines(tmp_path / "run", line(0, workers=[{"EARLY UPDATE": 3.0}]))
    assert worker_seconds(read_run(unknown)) == {"early update": 3.0}, "by its name"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"batch": {"unrewarded": 2}}, "25% of responses got no reward"),
        ({"lengths": {"truncated": 0.3}}, "30% of responses were truncated"),
        ({"batch": {"without_spread_share": 0.5}}, "50% of groups had equal rewards"),
        ({"seconds": {"total": 7.0}, "rollout": {}}, "set run.compare_every"),
        ({"rollout": {"drafted": 100, "accepted": 10}}, "rejected 90% of draft tokens"),
        ({"rollout": {"preemptions": 4}}, "preempted 0.50 times"),
        ({"workers": [{"IDLE": 3.5, "ROLLOUT": 6.5}]}, "idle for 30% of their time"),
        ({"seconds": {"update": 6.0, "total": 10.0, "rollout": 4.0}}, "update took 60% of the time"),
        ({"seconds": {"compare": 2.0, "total": 10.0, "rollout": 4.0}}, "2.00 times as long as plain decoding"),
    ],
)
def test_each_advice_follows_from_its_number(tmp_path: Path, changes: dict[str, object], said: str) -> None:
    calm = {"workers": [{"ROLLOUT": 10.0}]}
    quiet = read_run(with_lines(tmp_path / "calm", line(0, **calm)))
    assert advice(quiet) == ["No number of this run asks for a change."]
    advised = advice(read_run(with_lines(tmp_path / "run", line(0, **calm | changes))))
    assert any(said in sentence for sentence in advised)


def with_lines(folder: Path, *lines: dict[str, Any]) -> Path:
    """Return the folder of a made-up run with these metrics."""
    if not folder.exists():
        make_run(folder, steps=1)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(one) + "\n" for one in lines), encoding="utf-8")
    return folder


def test_repeated_prompts_and_missing_steps_are_counted(tmp_path: Path) -> None:
    found = read_run(with_lines(tmp_path / "run", line(0), line(1, prompts=[[0, 0], [0, 1]]), line(3)))
    assert (found.replayed, found.missing_steps) == (1, 1)


def test_the_proof_shows_compared_tokens_only_if_there_are_some(tmp_path: Path) -> None:
    def proof(compared: dict[str, int]) -> dict[str, object]:
        return shown(write_report(with_lines(tmp_path / "run", line(0, compared=compared))))["proof"]

    some = proof({"tokens": 160, "responses": 8, "differ": 3})
    assert some["tokens compared with plain decoding"] == "160 in 8 responses"
    none = proof({})
    assert "tokens compared with plain decoding" not in none
    assert none["responses that differ"] == "not compared"


def test_the_proof_has_the_result_of_the_check_at_start(tmp_path: Path) -> None:
    def proof() -> object:
        return shown(write_report(folder))["proof"]["bits with and without speculation"]

    folder = with_lines(tmp_path / "run", line(0))
    assert proof() == "known when the run ends"
    (folder / "summary.json").write_text(json.dumps({"exactness": "not exact: attention"}), encoding="utf-8")
    assert proof() == "not exact: attention"


def test_a_number_that_is_not_finite_is_left_out(tmp_path: Path) -> None:
    folder = with_lines(tmp_path / "run", line(0), line(1, update={"entropy": float("nan")}))
    assert shown(write_report(folder))["columns"]["update/entropy"] == [[1, 0.5]]


def test_text_of_a_name_cannot_end_the_script_element(tmp_path: Path) -> None:
    bad = "</pre></script><script>alert(1)</script>{{content}}\x00"
    path = write_report(make_run(tmp_path / "run", steps=1, config={"model": {"path": bad}}))
    assert path.read_text(encoding="utf-8").count("<script") == 2  # the content, and the page's own
    assert "script>" in shown(path)["sentences"][0]


@pytest.mark.parametrize("name", FILES)
def test_a_missing_or_truncated_file_is_named_or_left_out(tmp_path: Path, name: str) -> None:
    folder = make_run(tmp_path / "run", steps=2)
    path = folder / name
    whole = path.read_bytes()
    for cut in [*range(0, len(whole), max(1, len(whole) // 7)), len(whole) - 1]:
        path.write_bytes(whole[:cut])
        write_report(folder)
    path.write_bytes(whole[:-5])
    assert any(f"{name} " in fault and "damaged" in fault for fault in read_run(folder).faults)
    assert [step["step"] for step in read_run(folder).steps] == ([1] if name == "metrics.jsonl" else [1, 2])
    path.unlink()
    assert any(f"{name} is missing" in fault for fault in shown(write_report(folder))["faults"])


@pytest.mark.parametrize("name", ["config.json", "metrics.jsonl"])
def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    folder, open_file = make_run(tmp_path / "run", steps=1), Path.open

    def refused(path: Path, *arguments: Any, **options: Any) -> Any:
        if path.name == name:
            raise PermissionError(13, "Permission denied", str(path))
        return open_file(path, *arguments, **options)

    monkeypatch.setattr(Path, "open", refused)
    assert f"{name} cannot be read (Permission denied)." in shown(write_report(folder))["faults"]


def test_a_run_without_a_finished_step_has_a_page(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model": {"path": "m"}}', encoding="utf-8")
    (tmp_path / "metrics.jsonl").touch()
    started, _, advised = shown(write_report(tmp_path))["sentences"]
    assert started == "The run of m has not ended a step yet."
    assert advised == "Advice needs the numbers of a finished step."


def test_a_run_writes_its_page_and_who_proposed_each_token(tmp_path: Path) -> None:
    train(tiny_config(tmp_path, run={"compare_every": 1}))
    page = shown(tmp_path / "run" / "report.html")
    parts = ("sentences", "gain", "proof", "worker_seconds", "has_trace", "columns", "energy")
    assert all(page[part] for part in parts)
    rows = read_completions(tmp_path / "run")
    assert rows
    for row in rows:
        assert type(row["scores"]) is dict
        counts = [(int(count), letter) for count, letter in re.findall(r"(\d+)(\D)", row["proposed"])]
        assert sum(count for count, _ in counts) == row["length"]
        accepted = {letter: sum(n for n, other in counts if other == letter) for letter in ("a", "s", "e", ".")}
        assert accepted["a"] == row["decoded"]["seen_ahead"]
        assert row["length"] - accepted["."] == row["decoded"]["accepted"]


def test_a_page_that_fails_only_logs_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(run: object) -> str:
        raise RuntimeError("out of ink")

    monkeypatch.setattr(page_module, "page_of", broken)
    with caplog.at_level(logging.WARNING):
        write_report_or_warn(make_run(tmp_path / "run"))
    assert "report.html was not written (RuntimeError: out of ink); the run is not affected" in caplog.text


def test_the_command_writes_one_page_or_names_a_folder_that_is_not_a_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    make_run(tmp_path / "a")
    for arguments, out in ((["a"], "a/report.html"), (["a", "--out", "x"], "x")):
        with pytest.raises(SystemExit) as end:
            cli.main(["report", *arguments])
        assert end.value.code == 0
        assert capsys.readouterr().out.startswith(f"{out}: ")
        assert shown(tmp_path / out)["name"] == "a"
    with pytest.raises(SystemExit) as end:
        cli.main(["report", "nothing"])
    assert end.value.code == 2
    assert "nothing is not the folder of a run: give the run.folder of its recipe" in capsys.readouterr().err
    with pytest.raises(ReportError, match="give another --out"):
        write_report(tmp_path / "a", tmp_path / "no" / "page.html")

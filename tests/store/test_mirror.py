"""Checkpoints in a mirror: complete there or not at all, and resumed on a machine that has none."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from object_store import BUCKET, Cut, Environ, Forbidden, ObjectStore, object_store
from tiny import tiny_config, train

from tlt import cli
from tlt.config import Config, ConfigError
from tlt.config.show import resolved
from tlt.metrics import read_metrics
from tlt.store import checkpoint
from tlt.store.mirror import Mirror

pytestmark = pytest.mark.skipif(find_spec("fsspec") is None, reason="fsspec is an extra")
needs_s3 = pytest.mark.skipif(not (find_spec("s3fs") and find_spec("moto")), reason="s3fs and moto are extras")
places = iter(range(1000))


@pytest.fixture(scope="module")
def served() -> Iterator[ObjectStore]:
    with object_store() as store:
        yield store


@pytest.fixture
def store(served: ObjectStore) -> Iterator[ObjectStore]:
    yield served
    served.door = lambda environ: None


@pytest.fixture(params=["memory", pytest.param("s3", marks=needs_s3)])
def url(request: pytest.FixtureRequest) -> str:
    """Return the address of an object store, in which folders are only parts of names."""
    if request.param == "s3":
        request.getfixturevalue("store")
    return f"{request.param}://{BUCKET}/{next(places)}"


def save(root: Path, step: int) -> Path:
    def write(folder: Path) -> None:
        (folder / "policy").mkdir()
        (folder / "policy" / "model.safetensors").write_bytes(b"weights %d" % step)
        (folder / "optimizer.safetensors").write_bytes(b"moments")

    return checkpoint.save(root, step, {"step": step}, write, keep=2)


def copy(mirror: Mirror, *checkpoints: Path) -> None:
    for one in checkpoints:
        mirror.copy(one)
    mirror.close()


def wait_for(mirror: Mirror) -> None:
    mirror._copier.submit(lambda: None).result()


def fetched(url: str, root: Path, newer_than: int = 0) -> list[str]:
    Mirror(url, 2).fetch(root, newer_than)
    return sorted(path.name for path in root.glob("*"))


def test_a_fetched_checkpoint_is_the_saved_one(tmp_path: Path, url: str) -> None:
    saved = [save(tmp_path / "here", step) for step in (2, 10)]
    copy(Mirror(url, 2), *saved)
    assert Mirror(url, 2).newest == 10
    assert fetched(url, tmp_path / "there") == ["step_00000010"]
    assert checkpoint.latest(tmp_path / "there").state == {"step": 10}
    found = {p.relative_to(tmp_path / "there"): p.read_bytes() for p in (tmp_path / "there").rglob("*") if p.is_file()}
    root = tmp_path / "here"
    assert found == {p.relative_to(root): p.read_bytes() for p in saved[1].rglob("*") if p.is_file()}
    assert fetched(url, tmp_path / "other", newer_than=10) == []


@pytest.mark.parametrize("fails_at", [0, 3])
def test_an_incomplete_copy_is_none(tmp_path: Path, url: str, fails_at: int, caplog: pytest.LogCaptureFixture) -> None:
    first, second = (save(tmp_path / "here", step) for step in (1, 2))
    copy(Mirror(url, 2), first)
    mirror, puts = Mirror(url, 2), iter(range(10))
    real: Callable[..., None] = mirror._files.put_file

    def put(local: str, place: str) -> None:
        if next(puts) >= fails_at:
            raise OSError("the line is down")
        real(local, place)

    with patch.object(mirror._files, "put_file", put):
        mirror.copy(second)
        wait_for(mirror)
        assert Mirror(url, 2).newest == 1
        mirror.close()
    assert "step_00000002 was not copied" in caplog.text
    assert "(the line is down): it is tried again" in caplog.text
    assert fetched(url, tmp_path / "there") == ["step_00000001"]
    copy(Mirror(url, 1), save(tmp_path / "here", 3))
    assert Mirror(url, 2)._found() == {"step_00000003"}


def test_a_newer_damaged_copy_does_not_displace_complete_ones(tmp_path: Path) -> None:
    """A run that fell back to an older checkpoint copies its saves from there on."""
    there, root = tmp_path / "there", tmp_path / "run"
    copy(Mirror(f"file://{there}", keep=1), save(root, 9))
    (there / "step_00000009" / "optimizer.safetensors").write_bytes(b"torn")
    shutil.rmtree(root)
    for step, left in ((2, {2, 9}), (3, {3, 9}), (9, {9})):
        copy(Mirror(f"file://{there}", keep=1), save(root, step))
        assert {path.name for path in there.glob("step_*")} == {f"step_{one:08d}" for one in left}


def test_a_damaged_copy_is_skipped(tmp_path: Path, url: str, caplog: pytest.LogCaptureFixture) -> None:
    mirror = Mirror(url, 2)
    copy(mirror, *(save(tmp_path / "here", step) for step in (1, 2)))
    mirror._files.pipe_file(f"{mirror._root}/step_00000002/optimizer.safetensors", b"other")
    assert fetched(url, tmp_path / "there") == ["step_00000001"]
    assert "optimizer.safetensors is damaged" in caplog.text


def test_the_newest_checkpoint_is_copied_over_a_slow_connection(
    tmp_path: Path, url: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run has removed the checkpoint that is being copied. Of the waiting ones only the newest is copied."""
    monkeypatch.setattr("tlt.store.mirror._QUIET", 0.0)
    mirror, begun, up = Mirror(url, 4), threading.Event(), threading.Event()
    real: Callable[..., None] = mirror._files.put_file

    def put(local: str, place: str) -> None:
        begun.set()
        assert up.wait(30)
        real(local, place)

    with patch.object(mirror._files, "put_file", put):
        mirror.copy(save(tmp_path, 1))
        assert begun.wait(30)
        for step in (2, 3, 4):
            mirror.copy(save(tmp_path, step))
        threading.Timer(0.2, up.set).start()
        mirror.close()
    assert f"step_00000004 is being copied to {url}" in caplog.text
    assert sorted(Mirror(url, 4)._whole()) == ["step_00000001", "step_00000004"]


@needs_s3
def test_a_server_that_is_lost_and_returns(
    tmp_path: Path, store: ObjectStore, caplog: pytest.LogCaptureFixture
) -> None:
    url = f"s3://{BUCKET}/{next(places)}"
    saved = [save(tmp_path / "here", step) for step in (1, 2)]
    mirror = Mirror(url, 2)
    mirror.copy(saved[0])
    wait_for(mirror)

    def goes_away(environ: Environ) -> None:
        if environ["REQUEST_METHOD"] == "PUT" and environ["PATH_INFO"].endswith("model.safetensors"):
            store.go_away()
            raise Cut

    store.door = goes_away
    mirror.copy(saved[1])
    wait_for(mirror)
    store.door = lambda environ: None
    assert "step_00000002 was not copied" in caplog.text
    store.come_back()
    assert fetched(url, tmp_path / "there") == ["step_00000001"], "half of the second one is there"
    mirror.close()
    assert fetched(url, tmp_path / "there") == ["step_00000001", "step_00000002"]


@needs_s3
def test_a_store_without_access_gets_one_sentence(store: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> None:
    def refusal(url: str) -> str:
        said = r"run\.mirror = .* cannot be written to \([^\n]*\): check that the"
        with pytest.raises(ConfigError, match=said) as refused:
            Mirror(url, 2)
        return str(refused.value)

    assert "The specified bucket does not exist" in refusal("s3://another/run")
    assert "The specified bucket does not exist" in refusal("s3://another")

    def read_only(environ: Environ) -> None:
        if environ["REQUEST_METHOD"] == "PUT":
            raise Forbidden

    store.door = read_only
    assert "Access Denied" in refusal(f"s3://{BUCKET}/run")
    store.door = lambda environ: None
    monkeypatch.setattr("moto.settings.INITIAL_NO_AUTH_ACTION_COUNT", 0.0)  # from now on keys are looked at
    assert "Access Key" in refusal(f"s3://{BUCKET}/run")


def test_an_unusable_mirror_is_an_error_of_one_sentence() -> None:
    for url in ("nowhere://bucket", "s3://bucket/run" if find_spec("s3fs") is None else "gs2://bucket"):
        with pytest.raises(ConfigError, match=r"run\.mirror = .* cannot be used"):
            Mirror(url, 2)


def config_of(home: Path, folder: str, steps: int, **run: Any) -> Config:
    reward = {"name": "tiny_rewards:share_of_low_bytes", "folder": str(Path(__file__).parent.parent)}
    run = {"folder": str(home / folder), "save_every": 1, "seed": 1} | run
    return tiny_config(home, reward=reward, train={"steps": steps, "learning_rate": 1e-3}, run=run)


def run(config: Config, resume: bool = False) -> str:
    return train(config, resume)["policy_sha256"]


def test_a_run_resumes_on_a_machine_without_its_folder(tmp_path: Path, url: str) -> None:
    expected = run(config_of(tmp_path, "undisturbed", 4))
    run(config_of(tmp_path, "lost", 2, mirror=url))
    shutil.rmtree(tmp_path / "lost")
    fresh = config_of(tmp_path, "fresh", 4, mirror=url)
    with pytest.raises(ConfigError, match="already contains checkpoints: continue with --resume"):
        run(fresh)
    assert run(fresh, resume=True) == expected
    assert Mirror(url, 2).newest == 4
    shutil.rmtree(tmp_path / "fresh" / "checkpoints" / "step_00000004")
    (tmp_path / "fresh" / "checkpoints" / "step_00000003" / "state.json").write_text("{}")
    assert run(fresh, resume=True) == expected, "what is damaged here is fetched"


def test_resume_auto_finds_a_checkpoint_of_the_mirror(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(resolved(config_of(tmp_path, "run", 1, mirror=f"file://{tmp_path}/store")))
    for steps in (1, 2):
        with pytest.raises(SystemExit) as ended:
            cli.main(["train", str(recipe), "--resume", "auto", "--train.steps", str(steps)])
        assert ended.value.code == 0
        if steps == 1:
            shutil.rmtree(tmp_path / "run")
    assert read_metrics(tmp_path / "run")[-1]["step"] == 1
    assert "resuming from step 1" in capsys.readouterr().out

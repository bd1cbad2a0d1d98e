"""Access control of a Ray cluster, judged by the answer of its control process to a client without a token."""

from __future__ import annotations

import socket
import subprocess

import pytest

from tlt.cluster import workers
from tlt.cluster.pool import ClusterError
from tlt.cluster.workers import accepts_no_token, refuse_unreachable

REFUSED = "Traceback ...\nray.exceptions.AuthenticationError: RPC error: InvalidAuthToken: token is missing. Note: ..."


@pytest.mark.parametrize(("code", "said", "expected"), [(0, "", True), (0, "a warning", True), (1, REFUSED, False)])
def test_a_cluster_requires_a_token_if_it_refuses_a_client_without_one(
    code: int, said: str, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def run(command: list[str], env: dict[str, str], **options: object) -> subprocess.CompletedProcess[str]:
        asked.append((command[-1], env["RAY_AUTH_MODE"], "RAY_AUTH_TOKEN" in env))
        return subprocess.CompletedProcess(command, code, "", said)

    monkeypatch.setenv("RAY_AUTH_TOKEN", "secret")
    monkeypatch.setattr(subprocess, "run", run)
    assert accepts_no_token("10.0.0.1:6379") is expected
    assert asked == [("10.0.0.1:6379", "disabled", False)]


@pytest.mark.parametrize("said", ["ImportError: cannot import name 'GcsClient'", "", "RpcError: Timed out"])
def test_an_unclear_answer_is_not_a_refusal(said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "run", lambda command, **_: subprocess.CompletedProcess(command, 1, "", said))
    with pytest.raises(ClusterError, match=r"requires a token \(.+\): set TLT_ALLOW_NO_TOKEN=1"):
        accepts_no_token("10.0.0.1:6379")


def test_a_cluster_that_never_answers_does_not_block(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "_ASKS", "import time; time.sleep(600)")
    monkeypatch.setattr(workers, "_TOKEN_TIMEOUT", 0.2)
    with pytest.raises(ClusterError, match=r"requires a token \(no answer in 0\.2 s\)"):
        accepts_no_token("10.0.0.1:6379")


def test_an_address_without_an_answer_is_an_error_of_one_sentence() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        refuse_unreachable(f"127.0.0.1:{port}")
    with pytest.raises(ClusterError, match=rf"at 127\.0\.0\.1:{port} \(.+refused\): check cluster\.address"):
        refuse_unreachable(f"127.0.0.1:{port}")
    for left_to_ray in ("auto", "ray://127.0.0.1:1", "local"):
        refuse_unreachable(left_to_ray)

"""Checks of Ray's control process: whether it is running, and whether it requires an authentication token."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time

from tlt.cluster.pool import ClusterError

ALLOW_NO_TOKEN = "TLT_ALLOW_NO_TOKEN"
"""environment variable that is set to join a Ray cluster without authentication, on a private network"""
_EVERY = 5.0  # seconds between two checks
_MISSES = 3  # failed checks in a row after which Ray counts as lost; a busy cluster may miss one or two
_ANSWERS = 3.0  # timeout in seconds of one check
_REACHED_WITHIN = 10.0  # timeout in seconds for a connection to a cluster
_TOKEN_TIMEOUT = 120.0  # timeout in seconds for the process of `accepts_no_token`
_ASKS = "import sys; from ray._raylet import GcsClient; GcsClient(address=sys.argv[1])"


def _host_and_port(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def refuse_unreachable(address: str) -> None:
    """Raise ClusterError if nothing answers at an address host:port. Ray checks other forms of an address."""
    if "/" in address or not address.rpartition(":")[2].isdigit():
        return
    try:
        socket.create_connection(_host_and_port(address), _REACHED_WITHIN).close()
    except OSError as error:
        raise ClusterError(f"cannot join a Ray cluster at {address} ({error}): check cluster.address") from None


def allows_no_token() -> bool:
    return bool(os.environ.get(ALLOW_NO_TOKEN))


def accepts_no_token(address: str) -> bool:
    """Return whether the cluster accepts a client without an authentication token. The client is a separate process,
    because Ray reads the token at import. Raises ClusterError if this cannot be determined."""
    own = {name: value for name, value in os.environ.items() if not name.startswith("RAY_AUTH")}
    asked = [sys.executable, "-c", _ASKS, address]
    env = own | {"RAY_AUTH_MODE": "disabled"}
    try:
        done = subprocess.run(asked, env=env, capture_output=True, text=True, timeout=_TOKEN_TIMEOUT)
    except subprocess.TimeoutExpired:
        answer = f"no answer in {_TOKEN_TIMEOUT:g} s"
    else:
        if done.returncode == 0 or "AuthenticationError" in done.stderr:
            return done.returncode == 0
        answer = (done.stderr.strip().splitlines() or ["no output"])[-1]
    raise ClusterError(
        f"cannot determine whether the Ray cluster at {address} requires a token ({answer}): set "
        f"{ALLOW_NO_TOKEN}=1 if nobody else can reach it"
    )


class Control:
    """Monitor of Ray's control process at `address` (host:port).

    If the control process ends, workers still answer for about a minute. Then Ray ends the workers and the driver.
    Regular checks find the loss earlier, so there is time to save a checkpoint.
    """

    def __init__(self, address: str) -> None:
        self._at, self._address = _host_and_port(address), address
        self._next, self._missed = time.monotonic() + _EVERY, 0

    def check(self) -> None:
        """Check whether the control process accepts connections, at most every 5 s. After 3 failed checks in a row,
        raise ClusterError. The error is raised only once, so that the run can then save a checkpoint."""
        if time.monotonic() < self._next or self._missed >= _MISSES:
            return
        try:
            socket.create_connection(self._at, timeout=_ANSWERS).close()
            self._missed = 0
        except OSError:
            self._missed += 1
        self._next = time.monotonic() + _EVERY
        if self._missed == _MISSES:
            raise ClusterError(f"Ray's control process at {self._address} does not answer: restart the Ray cluster")

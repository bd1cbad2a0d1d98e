"""The example that runs environments of the real package verifiers: pip install 'verifiers>=0.4,<0.5'"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("verifiers", reason="verifiers is not installed")

from tlt.environments.instances import Environments, Turn
from tlt.rewards.verdicts import Verdict
from tlt.types import Prompt

HOME = Path(__file__).parents[2]


def test_the_users_messages_are_replies_and_the_rubric_gives_the_reward(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reward is 2.0 * right (1.0) + 0.5 that the environment records."""
    monkeypatch.syspath_prepend(HOME / "examples")
    from verifiers_environment import Episode

    command = [
        sys.executable,
        str(HOME / "examples" / "verifiers_environment.py"),
        "tiny_verifiers",
        '{"most": 4}',
        "3",
    ]
    written = subprocess.run(command, env=os.environ | {"PYTHONPATH": str(HOME / "tests")}, stdout=subprocess.PIPE)
    rows = list(map(json.loads, written.stdout.splitlines()))
    assert [row["question"][1]["content"] for row in rows] == ["Say 0.", "Say 1.", "Say 2."]
    environments, prompt = Environments(Episode, 20.0), Prompt(2, "", (1,), rows[2])
    texts = ("one", "three", "it is 2")
    found = [environments.answer_all([(prompt, Turn(1, 5, texts[:count]))])[0] for count in range(1, 4)]
    assert found[:2] == [Verdict(0.0, reply="No, say 2.")] * 2
    assert found[2] == Verdict(2.5, scores={"right": 1.0, "polite": 0.5, "turns": 3.0})
    both = [(Prompt(i, "", (1,), rows[i]), Turn(1, 6 + i, ("5",))) for i in (0, 1)]
    assert [verdict.reply for verdict in environments.answer_all(both)] == ["No, say 0.", "No, say 1."]
    (raised,) = environments.answer_all([(prompt, Turn(1, 9, ("raise",)))])
    assert (raised.outcome, raised.detail[-17:]) == ("error", "KeyError: 'bonus'")

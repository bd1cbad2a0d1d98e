"""Rewards for tests, in a module without heavy imports, so that their process starts fast."""

from __future__ import annotations

import asyncio
import math
import os
import subprocess
import sys
import time
from typing import Any


def share_of_low_bytes(prompt: Any, answer: str) -> float:
    """Return a reward that varies between the responses of a random model."""
    return sum(char < "m" for char in answer) / max(1, len(answer))


def every_third(prompt: Any, answer: str) -> float:
    """Return a reward that is equal in many groups of a random model. It depends on the first letter."""
    return float(sum(map(ord, answer[:1])) % 3 == 0)


def trouble(prompt: Any, answer: str) -> Any:
    """Cause the fault that the answer names."""
    match answer.split():
        case ["hang"]:
            time.sleep(3600)
        case ["raise"]:
            raise KeyError("bonus")
        case ["exit"]:
            sys.exit(3)
        case ["die"]:
            os._exit(1)
        case ["nan"]:
            return math.nan
        case ["infinite"]:
            return -math.inf
        case ["word"]:
            return "good"
        case ["nothing"]:
            return None
        case ["child"]:
            return float(os.getpid())
    return float(len(answer)) + prompt.data.get("bonus", 0)


def raises_now_and_then(prompt: Any, answer: str) -> float:
    if len(answer) % 3 == 0:
        raise ValueError("a length that cannot be judged")
    return share_of_low_bytes(prompt, answer)


def waits(prompt: Any, answer: str) -> float:
    """Wait, like a reward that calls a server."""
    time.sleep(float(answer))
    return 1.0


async def exits(prompt: Any, answer: str) -> float:
    if answer == "exit":
        sys.exit(3)
    await asyncio.sleep(0.1)
    return float(answer)


async def waits_in_a_thread(prompt: Any, answer: str) -> float:
    await asyncio.to_thread(time.sleep, float(answer))
    return 1.0


async def asks_a_server(prompt: Any, answer: str, length: int) -> float:
    await asyncio.sleep(float(answer))
    return float(length)


one_at_a_time = asyncio.Semaphore(1)


async def waits_in_line(prompt: Any, answer: str) -> float:
    async with one_at_a_time:
        await asyncio.sleep(0)
    return 1.0


async def wait_in_line(prompts: list[Any], answers: list[str]) -> list[float]:
    return await asyncio.gather(*map(waits_in_line, prompts, answers))


def of_lists(prompts: list[Any], answers: list[str], task: list[str]) -> list[float | None]:
    """Return the number of responses in the call, and None for an empty answer."""
    match answers:
        case ["few", *_]:
            return []
        case [("dict" | "set" | "str" | "bytes") as kind, *_]:
            return {"dict": {1: 0.0, 2: 0.0}, "set": {1, 2}, "str": "12", "bytes": b"12"}[kind]  # type: ignore[return-value]
    if "exit" in answers:
        sys.exit(3)
    if "raise" in answers:
        raise KeyError("bonus")
    if "hang" in answers:
        time.sleep(3600)
    return [float(len(answers)) if answer else None for answer in answers]


def all_there_is(
    prompt: Any, answer: str, task: str, token_ids: list[int], *, response: str, length: int, finish_reason: str
) -> float:
    found = [prompt.prompt_id, answer, task, token_ids, response, length, finish_reason]
    assert found == [5, "7", "sums", [1, 2], "it is 7", 2, "length"], found
    return 1.0


def prints(prompt: Any, answer: str) -> float:
    print("seen:", answer)
    subprocess.run(["echo", "and from a program:", answer], check=True)
    return 0.0


_HOLDS = "import sys, time; held = b'x' * (int(sys.argv[1]) * 2**20); time.sleep(60)"


def starts_programs(prompt: Any, answer: str) -> float:
    """Start four programs, each of which allocates this many MiB."""
    programs = [subprocess.Popen([sys.executable, "-c", _HOLDS, answer]) for _ in range(4)]
    return float(sum(program.wait() for program in programs))


def forks(prompt: Any, answer: str) -> float:
    """Fork four processes that share this many MiB."""
    held = b"x" * (int(answer) * 2**20)
    children = []
    for _ in range(4):
        if not (child := os.fork()):
            time.sleep(2.5)
            os._exit(held[0] - ord("x"))
        children.append(child)
    return float(sum(os.waitpid(child, 0)[1] for child in children))


def leaves_a_child(prompt: Any, answer: str) -> float:
    """Leave a child in a session of its own, started by a program that has ended."""
    command = "setsid sleep 3600 >/dev/null 2>&1 & echo $!"
    return float(subprocess.run(["sh", "-c", command], capture_output=True, text=True, check=True).stdout)


constant = 3

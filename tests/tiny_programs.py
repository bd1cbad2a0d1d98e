"""Rewards that start programs and loops, as graders of code and clients of servers do. Each returns 1 in a program of
its own, and needs less than three seconds."""

from __future__ import annotations

import _thread
import asyncio
import atexit
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

forks: Any = multiprocessing.get_context("fork")


def _endless(began: Any = None) -> None:
    if began:
        began.set()
    while True:
        time.sleep(0.1)


def _process(*arguments: Any) -> Any:
    """Start a process that never ends, and ends with this one."""
    process = forks.Process(target=_endless, args=arguments, daemon=True)
    process.start()
    return process


def _ends(started: subprocess.Popen[Any], number: int) -> float:
    try:
        return float(started.wait(2) == -number)
    except subprocess.TimeoutExpired:
        started.kill()
        return 0.0


def terminates_a_process(prompt: Any, answer: str) -> float:
    started = _process()
    started.join(0.1)
    started.terminate()
    started.join(2)
    return float(started.exitcode == -signal.SIGTERM)


def terminates_at_once(prompt: Any, answer: str) -> float:
    """Terminate forked processes in their first microseconds, from another thread too."""
    found = []

    def fork() -> None:
        started = _process()
        started.terminate()
        started.join(2)
        found.append(started.exitcode)

    fork()
    for _ in range(10):
        thread = threading.Thread(target=fork)
        thread.start()
        thread.join()
    return float(found == [-signal.SIGTERM] * 11)


def leaves_a_pool(prompt: Any, answer: str) -> float:
    with forks.Pool(1) as pool:
        try:
            pool.apply_async(_endless).get(timeout=0.1)
        except multiprocessing.TimeoutError:
            return 1.0
    return 0.0


def ends_an_executor(prompt: Any, answer: str) -> float:
    with ProcessPoolExecutor(1, mp_context=forks) as executor:
        future = executor.submit(_endless)
        time.sleep(0.1)
        for process in executor._processes.values():
            process.terminate()
        return float(isinstance(future.exception(2), BrokenProcessPool))


def terminates_a_program(prompt: Any, answer: str) -> float:
    started = subprocess.Popen(["sleep", "9"])
    started.terminate()
    return _ends(started, signal.SIGTERM)


def terminates_a_group(prompt: Any, answer: str) -> float:
    started = subprocess.Popen(["sleep", "9"], preexec_fn=os.setsid)
    os.killpg(started.pid, signal.SIGTERM)
    return _ends(started, signal.SIGTERM)


def hangs_up(prompt: Any, answer: str) -> float:
    started = subprocess.Popen(["sleep", "9"])
    started.send_signal(signal.SIGHUP)
    return _ends(started, signal.SIGHUP)


def interrupts_a_program(prompt: Any, answer: str) -> float:
    started = subprocess.Popen(["sleep", "9"])
    started.send_signal(signal.SIGINT)
    return _ends(started, signal.SIGINT)


def terminates_asynchronously(prompt: Any, answer: str) -> float:
    async def run() -> int:
        started = await asyncio.create_subprocess_exec("sleep", "9")
        started.terminate()
        return await asyncio.wait_for(started.wait(), 2)

    return float(asyncio.run(run()) == -signal.SIGTERM)


def keeps_its_own_handler(prompt: Any, answer: str) -> float:
    """A forked process has the handler that its parent has set."""
    before = signal.signal(signal.SIGTERM, lambda number, frame: os._exit(7))
    started = _process(began := forks.Event())
    began.wait(9)  # Python itself loses a signal that comes before
    started.terminate()
    started.join(2)
    signal.signal(signal.SIGTERM, before)
    return float(started.exitcode == 7)


def forks_a_local_function(prompt: Any, answer: str) -> float:
    """Run a function that cannot be pickled in a process, as the checkers of APPS and LiveCodeBench do."""
    found = multiprocessing.SimpleQueue()
    started = multiprocessing.Process(target=lambda: found.put(1.0))
    started.start()
    started.join(2)
    return found.get()


def forks_a_daemon(prompt: Any, answer: str) -> float:
    """Fork a process that starts a program and exits. The program goes on."""
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        program = subprocess.Popen(["sleep", "9"], start_new_session=True)
        os.write(writer, str(program.pid).encode())
        sys.exit()
    os.waitpid(child, 0)
    try:
        os.kill(int(os.read(reader, 99)), signal.SIGKILL)
    except ProcessLookupError:
        return 0.0
    return 1.0


def interrupts_itself(prompt: Any, answer: str) -> float:
    """Use a timeout that raises KeyboardInterrupt in the main thread."""
    threading.Timer(0.1, _thread.interrupt_main).start()
    try:
        for _ in range(20):
            time.sleep(0.1)
    except KeyboardInterrupt:
        return 1.0
    return 0.0


def sets_an_alarm(prompt: Any, answer: str) -> float:
    """Use a timeout as math-verify does, which Python allows in the main thread alone."""

    def raises(number: int, frame: Any) -> None:
        raise TimeoutError

    signal.signal(signal.SIGALRM, raises)
    signal.setitimer(signal.ITIMER_REAL, 0.1)
    try:
        time.sleep(2)
    except TimeoutError:
        return 1.0
    return 0.0


def runs_a_loop(prompt: Any, answer: str) -> float:
    return asyncio.run(asyncio.sleep(0, 1.0))


ALONE: list[Callable[[Any, str], float]] = [
    terminates_a_process,
    terminates_at_once,
    leaves_a_pool,
    ends_an_executor,
    terminates_a_program,
    terminates_a_group,
    hangs_up,
    interrupts_a_program,
    terminates_asynchronously,
    keeps_its_own_handler,
    forks_a_local_function,
    forks_a_daemon,
    interrupts_itself,
    sets_an_alarm,
    runs_a_loop,
]


def close_the_current_loop(prompts: list[Any], answers: list[str]) -> list[float]:
    """Use the current event loop and close it, which must not be the one for async rewards."""
    loop = asyncio.get_event_loop_policy().get_event_loop()
    found = loop.run_until_complete(asyncio.sleep(0, 1.0))
    loop.close()
    asyncio.set_event_loop(None)
    asyncio.set_event_loop(asyncio.new_event_loop())
    return [found] * len(answers)


def reads_its_input(prompt: Any, answer: str) -> float:
    program = subprocess.run([sys.executable, "-c", "input()"], capture_output=True, text=True, timeout=2)
    return float("EOFError" in program.stderr)


def crashes_but_not_its_child(prompt: Any, answer: str) -> float:
    if answer == "fork" and not os.fork():
        time.sleep(9)
    if answer == "program":
        os.system("sleep 9 &")
    os._exit(1)


def leaves_orphans(prompt: Any, answer: str) -> float:
    for _ in range(int(answer)):
        subprocess.run(["sh", "-c", "true &"], check=True)
    time.sleep(0.2)
    return float(os.getpid())


def runs_a_program(prompt: Any, answer: str) -> float:
    """Write the ids of this process and of a program to the file `answer`. Return 1 if the program ends by itself."""
    started = subprocess.Popen(["sleep", "1"])
    with Path(answer).open("a", encoding="utf-8") as file:
        file.write(f"{os.getpid()} {started.pid}\n")
    return float(started.wait() == 0)


_folders = []


def leaves_a_folder(prompt: Any, answer: str) -> float:
    """Make a temporary folder in the folder `answer`. Let exit handlers remove it and write a file."""
    _folders.append(tempfile.TemporaryDirectory(dir=answer))
    started = subprocess.Popen(["sleep", "3600"], start_new_session=True)
    atexit.register(Path(answer, "ended").write_text, str(started.pid))
    return float(len(os.listdir(answer)))


def hangs_at_its_end(prompt: Any, answer: str) -> float:
    atexit.register(time.sleep, 20)
    return float(os.getpid())

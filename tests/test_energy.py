"""Energy and CPU time from fake counters: the counters that are read, their overflow, and what is never mixed."""

from __future__ import annotations

import logging
import os
import shutil
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from tlt.config.run import RunConfig
from tlt.energy import CpuTime, Meter, MeteredTracer, Nvml, Rapl, total_energy

RANGE = 262_143_328_850  # microjoules, as an Intel package has it


def zone(root: Path, name: str, used: int) -> Path:
    place = root / name
    place.mkdir(parents=True)
    (place / "energy_uj").write_text(f"{used}\n", encoding="ascii")
    (place / "max_energy_range_uj").write_text(f"{RANGE}\n", encoding="ascii")
    return place


def test_packages_are_added_their_parts_are_not_and_a_counter_may_wrap(tmp_path: Path) -> None:
    first, second = zone(tmp_path, "intel-rapl:0", RANGE - 2_000_000), zone(tmp_path, "intel-rapl:1", 0)
    zone(tmp_path, "intel-rapl:0:0", 5)
    rapl = Rapl(tmp_path)
    assert rapl.read() == 0
    (first / "energy_uj").write_text("1000000", encoding="ascii")  # 2 J up to the end, and 1 J since
    (second / "energy_uj").write_text("4000000", encoding="ascii")
    assert rapl.read() == pytest.approx(7)
    (second / "energy_uj").write_text("5000000", encoding="ascii")
    assert rapl.read() == pytest.approx(8)
    assert Nvml(library([1_500, 2_500])).read() == pytest.approx(4), "all cards"


def library(used: list[int], error: Exception | None = None) -> SimpleNamespace:
    """Return a pynvml with one card for each number of millijoules."""

    def energy(card: int) -> int:
        if error:
            raise error
        return used[card]

    return SimpleNamespace(
        nvmlInit=lambda: None,
        nvmlDeviceGetCount=lambda: len(used),
        nvmlDeviceGetHandleByIndex=lambda index: index,
        nvmlDeviceGetTotalEnergyConsumption=energy,
    )


def test_without_a_counter_of_each_card_or_a_readable_package_there_is_no_energy(tmp_path: Path) -> None:
    assert not any((Nvml(library([])), Nvml(library([1], RuntimeError("not supported"))), Rapl(tmp_path / "nothing")))
    (tmp_path / "intel-rapl:0" / "energy_uj").mkdir(parents=True)  # a file that cannot be read
    assert not Rapl(tmp_path)


def test_cpu_time_is_that_of_this_process_and_its_descendants(tmp_path: Path) -> None:
    def process(pid: int | str, parent: int, *ticks: int) -> None:
        (tmp_path / str(pid)).mkdir()
        fields = ["S", parent, *[0] * 9, *ticks]  # the name may hold spaces and brackets
        (tmp_path / str(pid) / "stat").write_text(f"{pid} (a) b) {' '.join(map(str, fields))}", encoding="utf-8")

    me = os.getpid()
    process("self", 0)
    process(me, 0, 100, 20, 3, 0)  # as in a container
    process(me + 1, me, 1000, 0, 0, 0)
    process(me + 2, me + 1, 0, 10_000, 0, 0)
    process(me + 3, 1, 7, 7, 7, 7)  # of somebody else
    cpu = CpuTime(tmp_path, ticks=100)
    assert cpu.read() == pytest.approx(111.23)
    process(me + 4, me + 1, 50, 0, 0, 0)
    process(me + 5, me + 6, 50, 0, 0, 0)  # its parent has just ended
    assert cpu.read() == pytest.approx(111.23)
    cpu.find_descendants()
    assert cpu.read() == pytest.approx(111.73)
    shutil.rmtree(tmp_path / str(me + 4))
    assert cpu.read() == pytest.approx(111.23), "it has ended"
    for proc in (Path("/proc"), tmp_path / "no proc"):
        assert CpuTime(proc).read() >= sum(os.times()[:4]) - 0.05, "of this very process"


def metered(tmp_path: Path, used: list[int]) -> MeteredTracer:
    return MeteredTracer(Meter(rapl=Rapl(tmp_path), nvml=Nvml(library(used)), proc=tmp_path / "no proc"))


def test_the_energy_of_each_phase_is_recorded_and_reset_after_a_step(tmp_path: Path) -> None:
    used = [0]
    tracer = metered(tmp_path, used)
    for millijoules in (3_000, 1_000):
        with tracer.span("rollout"):
            used[0] += millijoules
    with tracer.span("save"):
        used[0] += 500
    run = RunConfig(watts_per_core=10.0, price_per_hour=3600.0)
    step = tracer.step_energy(run)
    assert step["gpu_joules"] == pytest.approx(4.5)
    assert step["phases"].keys() == {"rollout"}
    assert step["phases"]["rollout"]["gpu_joules"] == pytest.approx(4)
    assert step["estimated_cpu_joules"] == pytest.approx(10 * step["cpu_seconds"])
    assert 0 < step["cost"] < 60
    assert tracer.step_energy(run)["gpu_joules"] == 0
    assert [span.name for span in tracer.drain()][-1] == "save"


def test_the_price_is_that_of_an_hour(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    tracer, run = MeteredTracer(), RunConfig(price_per_hour=4.0)
    for seconds in (1800, 900):
        now[0] += seconds
        assert tracer.step_energy(run) == {"cost": pytest.approx(4 * seconds / 3600)}


def test_energy_is_estimated_only_if_no_counter_measures_it_or_the_counter_has_failed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    package, run = zone(tmp_path, "intel-rapl:0", 0), RunConfig(watts_per_core=10.0)
    tracer = metered(tmp_path, [])
    assert tracer.step_energy(run).keys() & {"cpu_joules", "estimated_cpu_joules", "cost"} == {"cpu_joules"}
    (package / "energy_uj").unlink()
    with caplog.at_level(logging.WARNING), tracer.span("rollout"):
        pass
    assert tracer.step_energy(run).keys() & {"cpu_joules", "estimated_cpu_joules"} == {"estimated_cpu_joules"}
    assert caplog.text.count("energy/cpu_joules is no longer recorded") == 1


def test_nothing_is_measured_with_workers_on_other_machines() -> None:
    assert Meter(one_machine=False).read() == {}
    assert MeteredTracer().step_energy(RunConfig()) == {}


def lines(*rewards: float) -> list[dict]:
    """Return metrics of steps with 10 J and 500 tokens. Every second one compares 3 J of plain decoding with 2 J."""
    phases = [{"rollout": {"gpu_joules": 2.0}} | ({"compare": {"gpu_joules": 3.0}} if i % 2 else {}) for i in range(9)]
    return [
        {"step": i, "tokens": 500, "reward": reward, "energy": {"gpu_joules": 10.0, "phases": phases[i]}}
        for i, reward in enumerate(rewards)
    ]


def test_totals_by_hand() -> None:
    found = total_energy(lines(0.1, 0.1, 0.2, 0.3))
    assert found["sums"] == {"gpu_joules": 40}
    assert found["per_step"] == {"gpu_joules": 10}
    assert found["per_million_tokens"] == {"gpu_joules": pytest.approx(20_000)}
    assert found["per_reward_point"] == {"gpu_joules": pytest.approx(40 / 20)}
    assert found["compared"] == {"steps": 2, "plain": {"gpu_joules": 6}, "ours": {"gpu_joules": 4}}
    assert total_energy(lines(0.3, 0.1))["per_reward_point"] == {}  # nothing was gained
    assert total_energy([{"step": 0, "energy": {}}]) == {}


def test_processes_that_start_in_a_step_count_from_its_end_on(tmp_path: Path) -> None:
    """Such as a replacement of a lost worker."""

    def process(pid: int | str, parent: int, ticks: int) -> None:
        (tmp_path / str(pid)).mkdir(exist_ok=True)
        fields = ["S", parent, *[0] * 9, ticks, 0, 0, 0]
        (tmp_path / str(pid) / "stat").write_text(f"{pid} (a) {' '.join(map(str, fields))}", encoding="utf-8")

    me, second = os.getpid(), os.sysconf("SC_CLK_TCK")
    process("self", 0, 0)
    process(me, 1, 0)
    tracer = MeteredTracer(Meter(rapl=Rapl(tmp_path), nvml=Nvml(library([])), proc=tmp_path))
    process(me + 1, me, second)
    assert tracer.step_energy(RunConfig())["cpu_seconds"] == pytest.approx(1.0)
    process(me + 1, me, 3 * second)
    with tracer.span("update"):
        process(me + 1, me, 5 * second)
    step = tracer.step_energy(RunConfig())
    assert step["cpu_seconds"] == pytest.approx(4.0)
    assert step["phases"]["update"]["cpu_seconds"] == pytest.approx(2.0)

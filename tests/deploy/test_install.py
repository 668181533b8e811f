"""The preflight of the installation: each thing that is missing gives its one line, with the cure."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from deploy import install
from deploy.install import fail, main, make_venv, pip_failure, stages, venv_device
from deploy.install_machine import (
    CPU,
    CUDA,
    MIN_DISK_BYTES,
    Machine,
    SmiAnswer,
    ask_nvidia_smi,
    choose_device,
    cpu_flags,
    find_obstacle,
    memory_bytes,
    read_machine,
)

GOOD = Machine(
    system="Linux",
    architecture="x86_64",
    glibc=(2, 36),
    cpu_flags=frozenset({"sse4_2", "avx2"}),
    python=(3, 11),
    has_ensurepip=True,
    memory_bytes=8 * 10**9,
    disk_free_bytes=20 * 10**9,
)


H200 = SmiAnswer(0, "NVIDIA H200, 580.159.04\n")


def obstacle_of(machine: Machine, *, device: str = CPU) -> str | None:
    return find_obstacle(machine, device=device, folder=Path("/clone"), disk_bytes=MIN_DISK_BYTES[device])


@pytest.mark.parametrize("python", [(3, 11), (3, 12)])
def test_a_machine_as_the_readme_asks_for_has_no_obstacle(python: tuple[int, int]) -> None:
    assert obstacle_of(replace(GOOD, python=python)) is None


@pytest.mark.parametrize(
    ("machine", "names", "cure"),
    [
        (replace(GOOD, system="Darwin"), "Darwin", "Linux machine or container"),
        (replace(GOOD, architecture="aarch64"), "aarch64", "x86-64 machine"),
        (replace(GOOD, glibc=(2, 27)), "glibc 2.27", "Debian 12"),
        (replace(GOOD, glibc=None), "another C library", "Debian 12"),
        (replace(GOOD, cpu_flags=frozenset({"sse4_2"})), "no AVX2", "machine"),
        (replace(GOOD, python=(3, 10)), "3.10", "make PYTHON="),
        (replace(GOOD, python=(3, 13)), "3.13", "apt-get install"),
        (replace(GOOD, has_ensurepip=False), "venv", "apt-get install python3.11-venv"),
        (replace(GOOD, memory_bytes=4 * 10**9), "4.0 GB", "larger machine"),
        (replace(GOOD, disk_free_bytes=10**9), "1.0 GB", "free some"),
    ],
)
def test_what_is_missing_is_said_in_one_line_with_the_cure(machine: Machine, names: str, cure: str) -> None:
    obstacle = obstacle_of(machine)

    assert obstacle is not None
    assert names in obstacle
    assert cure in obstacle
    assert "\n" not in obstacle


def test_failure_ends_with_status_2_and_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        fail("no network")

    assert ended.value.code == 2
    assert capsys.readouterr().err == "install: no network\n"


@pytest.mark.parametrize(
    ("limit", "expected"), [("max\n", 8_192_000_000), ("", 8_192_000_000), ("4000000000\n", 4 * 10**9)]
)
def test_a_containers_limit_counts_where_it_is_smaller(limit: str, expected: int) -> None:
    meminfo = "MemTotal:        8000000 kB\nMemFree:          100000 kB\n"

    assert memory_bytes(meminfo=meminfo, cgroup_limit=limit) == expected


def test_cpu_flags_are_those_of_the_processor() -> None:
    cpuinfo = "processor\t: 0\nvmx flags\t: vnmi\nflags\t\t: fpu avx avx2\nbugs\t\t: spectre_v1\n"

    assert cpu_flags(cpuinfo) == {"fpu", "avx", "avx2"}


@pytest.mark.parametrize(
    ("log", "expected"),
    [
        (
            (
                "WARNING: Retrying after NameResolutionError\n"
                "ERROR: No matching distribution found for torch==2.13.0+cpu\n"
                "ERROR: ResolutionImpossible: for help visit the documentation\n"
            ),
            "No matching distribution found for torch==2.13.0+cpu: the package index is out of reach",
        ),
        ("ERROR: Could not install packages due to an OSError: [Errno 28] No space left on device\n", "free some disk"),
        (
            "Traceback (most recent call last):\n  ...\nModuleNotFoundError: No module named 'vllm'\n",
            "No module named 'vllm'",
        ),
        ("Killed\n", "it says no more"),
    ],
)
def test_the_reason_of_a_failed_stage_is_found_in_its_log(log: str, expected: str) -> None:
    reason = pip_failure(log)

    assert expected in reason
    assert "\n" not in reason


def test_vllm_needs_avx2_on_a_cpu_alone() -> None:
    assert obstacle_of(replace(GOOD, cpu_flags=frozenset()), device=CUDA) is None


def test_cuda_needs_more_disk() -> None:
    obstacle = obstacle_of(replace(GOOD, disk_free_bytes=MIN_DISK_BYTES[CUDA] - 1), device=CUDA)

    assert obstacle is not None
    assert f"{MIN_DISK_BYTES[CUDA] / 1e9:.0f} GB of free disk" in obstacle


def test_this_machine_is_read() -> None:
    assert read_machine(Path()).python == sys.version_info[:2]


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (H200.text, "NVIDIA H200, driver 580.159.04: installing for CUDA 13"),
        (2 * H200.text, "2 x NVIDIA H200, driver 580.159.04: installing for CUDA 13"),
        ("NVIDIA GeForce RTX 4090, 610.7\n", "NVIDIA GeForce RTX 4090, driver 610.7: installing for CUDA 13"),
        (
            f"WARNING: infoROM is corrupted at gpu\n{H200.text}",
            "NVIDIA H200, driver 580.159.04: installing for CUDA 13",
        ),
    ],
)
def test_a_gpu_with_a_new_enough_driver_takes_the_cuda_list(text: str, line: str) -> None:
    choice = choose_device("auto", SmiAnswer(0, text))

    assert (choice.device, choice.reason) == (CUDA, line)


@pytest.mark.parametrize(
    ("answer", "names", "cure"),
    [
        (SmiAnswer(0, "NVIDIA A100-SXM4-80GB, 570.86.15\n"), "NVIDIA A100-SXM4-80GB, driver 570.86.15", "update it"),
        (SmiAnswer(9, "NVIDIA-SMI has failed because it\ncould not talk to the driver.\n"), "has failed", "mend"),
        (SmiAnswer(12, ""), "exit status 12", "DEVICE=cuda"),
        (SmiAnswer(0, "[N/A], [N/A]\n"), "[N/A]", "mend"),
    ],
)
def test_a_gpu_that_cannot_be_used_takes_the_cpu_list_and_says_so_in_one_line(
    answer: SmiAnswer, names: str, cure: str
) -> None:
    choice = choose_device("auto", answer)

    assert choice.device == CPU
    assert "installing for the CPU" in choice.reason
    assert names in choice.reason
    assert cure in choice.reason
    assert "\n" not in choice.reason


@pytest.mark.parametrize("answer", [None, SmiAnswer(6, "No devices were found\n")])
def test_no_gpu_takes_the_cpu_list_without_a_word(answer: SmiAnswer | None) -> None:
    choice = choose_device("auto", answer)

    assert (choice.device, choice.reason) == (CPU, "")


@pytest.mark.parametrize("answer", [None, H200, SmiAnswer(9, "failed"), SmiAnswer(0, "Tesla T4, 535.1")])
@pytest.mark.parametrize("asked", [CPU, CUDA])
def test_a_device_that_is_named_is_taken(asked: str, answer: SmiAnswer | None) -> None:
    assert choose_device(asked, answer).device == asked


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        ("echo NVIDIA H200, 580.159.04", H200),
        ("echo has failed >&2; exit 9", SmiAnswer(9, "has failed\n")),
    ],
)
def test_nvidia_smi_is_asked(script: str, expected: SmiAnswer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))

    assert ask_nvidia_smi() == expected


def test_an_nvidia_smi_that_does_not_start_is_a_broken_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "nvidia-smi").write_bytes(b"\x7fELF")
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))

    answer = ask_nvidia_smi()

    assert answer is not None
    assert choose_device("auto", answer).device == CPU
    assert "Exec format error" in choose_device("auto", answer).reason


def test_no_nvidia_smi_is_no_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))

    assert ask_nvidia_smi() is None


@pytest.mark.parametrize("device", [CPU, CUDA])
def test_checks_and_tests_need_one_stage_more_and_change_no_other(device: str) -> None:
    runtime, development = stages(device, is_dev=False), stages(device, is_dev=True)

    assert [stage.name for stage in development if stage not in runtime] == ["dev"]
    assert all(stage in development for stage in runtime)


def test_each_device_has_its_lists_and_its_vllm_worker() -> None:
    for device, other in ((CPU, CUDA), (CUDA, CPU)):
        inputs = {name for stage in stages(device, is_dev=False) for name in stage.inputs}
        commands = repr([stage.commands for stage in stages(device, is_dev=False)])

        assert {f"requirements/torch-{device}.txt", f"requirements/{device}.txt"} <= inputs
        assert f"{other}.txt" not in commands
        assert ("cpu_worker" in commands, "gpu_worker" in commands) == (device == CPU, device == CUDA)


def test_the_keys_of_what_differs_between_devices_differ() -> None:
    for_cpu, for_cuda = ({stage.name: stage.key() for stage in stages(device, is_dev=True)} for device in (CPU, CUDA))

    assert {name for name, key in for_cpu.items() if for_cuda[name] != key} == {"torch", "packages", "imports"}


@pytest.mark.parametrize("device", [CPU, CUDA])
def test_every_package_of_a_list_is_pinned_once_and_in_order(device: str) -> None:
    lines = [
        line
        for line in (install.ROOT / f"requirements/{device}.txt").read_text().splitlines()
        if not line.startswith("#")
    ]
    names = [line.partition("==")[0].lower() for line in lines]

    assert all(line.partition("==")[2] for line in lines)
    assert len(names) == len(set(names))
    assert lines == sorted(lines, key=str.lower)


class TestDeviceOfAVenv:
    @pytest.fixture(autouse=True)
    def venv(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        """A folder that looks like a virtual environment made here; making one anew only empties it."""
        folder = tmp_path / ".venv"
        monkeypatch.setattr(install, "VENV", folder)
        monkeypatch.setattr(install, "DEVICE_FILE", folder / "tandem-device")
        self.fill(folder)

        def made(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
            self.fill(folder)
            (folder / "old").unlink(missing_ok=True)
            return subprocess.CompletedProcess(command, 0, "", "")

        monkeypatch.setattr(subprocess, "run", made)
        return folder

    @staticmethod
    def fill(folder: Path) -> None:
        (folder / "bin").mkdir(parents=True, exist_ok=True)
        (folder / "bin" / install.PYTHON_NAME).touch()
        (folder / "bin" / "pip").write_text(f"#!{folder}/bin/python")
        (folder / "old").touch()

    def test_an_older_venv_that_does_not_say_it_is_for_the_cpu(self) -> None:
        assert venv_device() == install.VenvDevice(CPU, is_asked=False)

    def test_the_same_device_keeps_the_venv(self, venv: Path, capsys: pytest.CaptureFixture[str]) -> None:
        make_venv(CPU)

        assert (venv / "old").exists()
        assert capsys.readouterr().out == ""

    def test_another_device_makes_it_anew_and_says_so(self, venv: Path, capsys: pytest.CaptureFixture[str]) -> None:
        make_venv(CUDA)

        assert not (venv / "old").exists()
        assert ".venv is installed for the CPU: making it anew for CUDA 13" in capsys.readouterr().out

    @pytest.mark.parametrize(
        ("first", "answer", "expected"),
        [
            ([], H200, ["cuda found", "cuda found"]),
            ([], None, ["cpu found", "cpu found"]),
            (["--device", "cpu"], H200, ["cpu asked", "cpu asked"]),
            (["--device", "cuda"], None, ["cuda asked", "cuda asked"]),
        ],
    )
    def test_a_device_once_named_is_kept_by_calls_that_name_none(
        self,
        first: list[str],
        answer: SmiAnswer | None,
        expected: list[str],
        venv: Path,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        monkeypatch.setattr(install, "ask_nvidia_smi", lambda: answer)
        monkeypatch.setattr(install, "read_machine", lambda _: replace(GOOD, disk_free_bytes=10**12))
        monkeypatch.setattr(install, "run_stage", lambda stage: stage.stamp().write_text(stage.key()))
        said = []

        for arguments in (first, []):
            main(arguments)
            said.append((venv / "tandem-device").read_text())

        assert said == expected


def test_the_file_runs_by_its_path_without_any_package() -> None:
    ended = subprocess.run(
        [sys.executable, "-I", "-S", str(install.ROOT / "deploy" / "install.py"), "--help"],
        capture_output=True,
        text=True,
        check=False,
        cwd="/",
    )

    assert ended.returncode == 0, ended.stderr
    assert "--device {auto,cpu,cuda}" in ended.stdout

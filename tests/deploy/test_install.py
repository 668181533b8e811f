"""The preflight of the installation: each thing that is missing gives its one line, with the cure."""

from dataclasses import replace

import pytest

from deploy.install import Machine, cpu_flags, fail, find_obstacle, memory_bytes, pip_failure, stages

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


@pytest.mark.parametrize("python", [(3, 11), (3, 12)])
def test_a_machine_as_the_readme_asks_for_has_no_obstacle(python: tuple[int, int]) -> None:
    assert find_obstacle(replace(GOOD, python=python)) is None


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
    obstacle = find_obstacle(machine)

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


def test_checks_and_tests_need_one_stage_more_and_change_no_other() -> None:
    runtime, development = stages(is_dev=False), stages(is_dev=True)

    assert [stage.name for stage in development if stage not in runtime] == ["dev"]
    assert all(stage in development for stage in runtime)

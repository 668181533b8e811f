"""Datasets of the Hub: what is loaded, and what is said where it cannot be."""

from typing import Any

import datasets
import pytest
from datasets.exceptions import DatasetNotFoundError

from runtime.problems import hub
from runtime.problems.hub import read_hub
from runtime.problems.rows import DataError, Table


def _read(**changes: str) -> Table:
    return read_hub("org/name", **({"subset": "main", "split": "train", "revision": ""} | changes))


def test_a_dataset_gives_numbered_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def load(*place: Any, **options: Any) -> datasets.Dataset:
        asked.append((place, options))
        return datasets.Dataset.from_dict({"question": ["a", "b"], "answer": ["1", "2"], "long": ["x", "y"]})

    monkeypatch.setattr(datasets, "load_dataset", load)

    table = _read()

    assert (table.name, table.stem, table.columns) == ("org/name", "name", ("question", "answer", "long"))
    assert list(table.read(["question"])) == [(1, {"question": "a"}), (2, {"question": "b"})]
    assert asked == [(("org/name", "main"), {"split": "train", "revision": None})]


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (DatasetNotFoundError("Dataset 'org/name' doesn't exist on the Hub"), "the Hub has no such dataset, or it is"),
        (DatasetNotFoundError("Dataset 'org/name' is a gated dataset on the Hub."), "is gated; ask for access"),
        (ConnectionError("Couldn't reach 'org/name'"), "is not in the local cache, and the Hub cannot be reached"),
        (ValueError("BuilderConfig 'main' not found. Available: ['a']"), r"has no subset main: .*\['a'\]"),
        (ValueError("Unknown split \"train\". Should be one of ['test']."), r"has no split train: .*\['test'\]"),
        (RuntimeError("Dataset scripts are no longer supported"), "cannot be loaded: Dataset scripts"),
        (FileNotFoundError("Couldn't find\n any data file"), "cannot be loaded: Couldn't find any data file"),
    ],
)
def test_what_the_hub_refuses_is_one_line(monkeypatch: pytest.MonkeyPatch, error: Exception, line: str) -> None:
    def load(*_place: Any, **_options: Any) -> None:
        raise error

    monkeypatch.setattr(datasets, "load_dataset", load)

    with pytest.raises(DataError, match=f"^org/name: {line}") as caught:
        _read()

    assert "\n" not in str(caught.value)


def test_a_network_that_is_away_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    kind = hub._network_errors()[0]

    def load(*_place: Any, **_options: Any) -> None:
        raise kind("no route")

    monkeypatch.setattr(datasets, "load_dataset", load)

    with pytest.raises(DataError, match="the Hub cannot be reached: no route"):
        _read()


def test_offline_a_dataset_that_is_not_cached_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets, "load_dataset", lambda *_place, **_options: (_ for _ in ()).throw(ConnectionError()))

    with pytest.raises(DataError, match="HF_HUB_OFFLINE or HF_DATASETS_OFFLINE forbids"):
        _read()

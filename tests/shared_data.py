"""Public datasets that may lie beside the checkout; tests of them are skipped where they do not."""

import os
from pathlib import Path

import pytest

_FOLDER = Path(os.environ.get("TANDEM_SHARED_DATA", Path(__file__).parents[2] / "shared" / "data"))


def shared_file(name: str) -> str:
    """The path of a dataset's file; the test that asks for one that is absent is skipped."""
    path = _FOLDER / name
    if not path.is_file():
        pytest.skip(f"{path} is absent")
    return str(path)

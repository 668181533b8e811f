"""Imports of torch, vLLM and the like without the garbage collector."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def heavy_imports() -> Iterator[None]:
    """Imports inside it are made without collections, and what they made is left out of later ones.

    They make some million objects that live to the end of the process. Looking for garbage among them took 1.5 s of
    8 s of the learner's imports, and as much again when the process ended.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()

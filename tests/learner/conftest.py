"""Shapes are checked at run time wherever the tests of the learner run its tensor functions."""

from jaxtyping import install_import_hook

install_import_hook(["learner.batch", "learner.logprobs", "learner.loss"], "beartype.beartype")

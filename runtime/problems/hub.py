"""Rows of a dataset of the Hugging Face Hub, or of its copy in the local cache."""

from collections.abc import Iterator, Sequence
from typing import Any

from runtime.problems.rows import DataError, Row, Table


def read_hub(dataset_id: str, *, subset: str, split: str, revision: str) -> Table:
    """Loads one split; with HF_HUB_OFFLINE=1, or without a network, what an earlier load left in the cache.

    Args:
        dataset_id: Such as "openai/gsm8k".
        subset: Configuration of the dataset, such as "main"; empty for its only one.
        split: Such as "train".
        revision: Branch, tag or commit; empty for the newest.

    Raises:
        DataError: There is no such dataset, subset, split or revision, it may not be read, or the Hub is out of reach.
    """
    # Two seconds, which only datasets of the Hub need.
    import datasets  # noqa: PLC0415
    from datasets.exceptions import DatasetsError  # noqa: PLC0415

    try:
        dataset: Any = datasets.load_dataset(dataset_id, subset or None, split=split, revision=revision or None)
    # Scripts that datasets no longer runs are a RuntimeError; wrong subsets and splits are a ValueError; what the Hub
    # answers is an OSError; what the network does is one of httpx's errors.
    except (DatasetsError, OSError, ValueError, RuntimeError, *_network_errors()) as error:
        raise DataError(f"{dataset_id}: {_reason(error, subset=subset, split=split, revision=revision)}") from error
    if len(dataset) == 0:
        raise DataError(f"{dataset_id}: its split {split} is empty, it must have at least one row")

    def read(wanted: Sequence[str]) -> Iterator[tuple[int, Row]]:
        return enumerate(dataset.select_columns(list(wanted)), start=1)

    stem = dataset_id.rpartition("/")[2]
    return Table(name=dataset_id, stem=stem, unit="row", columns=tuple(dataset.column_names), read=read)


def _reason(error: Exception, *, subset: str, split: str, revision: str) -> str:
    """What went wrong and what to do about it; datasets drops the causes of some errors, but not their words."""
    import datasets  # noqa: PLC0415
    from datasets.exceptions import DatasetNotFoundError  # noqa: PLC0415
    from huggingface_hub.errors import GatedRepoError, OfflineModeIsEnabled, RevisionNotFoundError  # noqa: PLC0415

    said = " ".join(str(error).split()) or type(error).__name__
    if isinstance(error, GatedRepoError) or "is a gated dataset" in said:
        return "is gated; ask for access on its page of the Hub, then set HF_TOKEN"
    if isinstance(error.__cause__ or error, RevisionNotFoundError):
        return f"has no revision {revision}"
    if isinstance(error, DatasetNotFoundError) or type(error).__name__ == "RepositoryNotFoundError":
        return "the Hub has no such dataset, or it is private; check the id, or set HF_TOKEN"
    if isinstance(error, (ConnectionError, OfflineModeIsEnabled, *_network_errors())):
        if datasets.config.HF_HUB_OFFLINE:
            return "is not in the local cache, and HF_HUB_OFFLINE or HF_DATASETS_OFFLINE forbids to ask the Hub"
        return f"is not in the local cache, and the Hub cannot be reached: {said}"
    if isinstance(error, ValueError) and ("Config name" in said or "BuilderConfig" in said):
        return f"{f'has no subset {subset}' if subset else 'needs a subset'}: {said}"
    if isinstance(error, ValueError) and "split" in said:
        return f"has no split {split}: {said}"
    return f"cannot be loaded: {said}"


def _network_errors() -> tuple[type[Exception], ...]:
    # datasets and huggingface_hub may use different majors of httpx; each passes its own errors through.
    import datasets.load  # noqa: PLC0415
    import huggingface_hub.errors  # noqa: PLC0415

    return (datasets.load.httpx.HTTPError, huggingface_hub.errors.HTTPError)

"""Where the model of a run comes from: made on the spot, a folder, or a hub."""

from pathlib import Path

from deploy.errors import UserError, written_or_said
from deploy.run_file import ModelSection
from deploy.tiny_model import ensure_tiny_model

TINY = "tiny"


def resolve_model(settings: ModelSection, *, seed: int) -> Path:
    """The folder of the model, which is made or fetched where it is not there yet.

    What exists, or begins with `/`, `.` or `~`, is a folder; any other `org/name` is the id of a model on a hub.

    Args:
        settings: Source and revision.
        seed: Of the tiny model.

    Returns:
        Its path, absolute.

    Raises:
        UserError: There is no such model, or it cannot be had.
    """
    source, revision = settings.source, settings.revision
    folder = None if source == TINY else _folder(source)
    if folder is None and source != TINY:
        # It takes half a second to import, which a local folder need not pay.
        from deploy.hub import fetch_model

        return fetch_model(source, revision=revision).absolute()
    if revision:
        raise UserError(
            f"model.revision = {revision}: only a model of a hub has revisions, not model.source = {source}"
        )
    return (folder or _tiny(settings, seed=seed)).absolute()


def _tiny(settings: ModelSection, *, seed: int) -> Path:
    with written_or_said(f"model.cache_folder = {settings.cache_folder}"):
        return ensure_tiny_model(cache_folder=Path(settings.cache_folder).expanduser(), seed=seed)


def _folder(source: str) -> Path | None:
    """The folder that is meant; None for the id of a model on a hub."""
    try:
        folder = Path(source).expanduser()
    except RuntimeError as error:
        raise UserError(f"model.source = {source}: {error}") from error
    if folder.is_dir():
        return folder
    if folder.exists():
        raise UserError(f"model.source = {source}: is a file; name the folder of the model")
    organisation, slash, name = source.partition("/")
    if slash and organisation and name and "/" not in name and source[0] not in ".~":
        return None
    raise UserError(f"model.source = {source}: there is no such folder, and the id of a model on a hub is org/name")

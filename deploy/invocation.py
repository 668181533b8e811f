"""How the `tandem` command is typed where the user stands, for the commands that are suggested to them."""

import shutil
import sys
from pathlib import Path


def program() -> str:
    """`tandem` where the shell finds this very command under that name, else its path, as short as it can be."""
    own = Path(sys.executable).with_name("tandem")
    found = shutil.which("tandem")
    if found is not None and Path(found).absolute() == own.absolute():
        return "tandem"
    return str(shown(own))


def shown(path: Path) -> Path:
    """A path as short as a user standing here would write it."""
    here = Path.cwd()
    return path.relative_to(here) if path.is_relative_to(here) else path

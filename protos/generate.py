"""Generates the Python code of every .proto file beside it, or (`--check`) compares what is there with a fresh run."""

import argparse
import sys
import tempfile
from pathlib import Path

from grpc_tools import protoc

ROOT = Path(__file__).resolve().parent.parent
GENERATED = ("*_pb2.py", "*_pb2.pyi", "*_pb2_grpc.py", "*_pb2_grpc.pyi")


def generate(output: Path) -> None:
    """Writes the generated code under `output`, in the folders that the packages have in the repository.

    Raises:
        RuntimeError: protoc refused a file; it has said which and why.
    """
    sources = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "protos").rglob("*.proto"))
    status = protoc.main(
        [
            "protoc",
            f"--proto_path={ROOT}",
            f"--python_out={output}",
            f"--pyi_out={output}",
            f"--grpc_python_out={output}",
            # grpcio-tools types messages only; stubs and servicers get their types from mypy-protobuf.
            f"--plugin=protoc-gen-mypy_grpc={Path(sys.executable).parent / 'protoc-gen-mypy_grpc'}",
            f"--mypy_grpc_out=quiet:{output}",
            *sources,
        ]
    )
    if status != 0:
        raise RuntimeError(f"protoc ended with status {status}")


def generated_files(root: Path) -> dict[str, bytes]:
    """Returns the content of every generated file under `root`, by its path relative to it."""
    paths = (path for pattern in GENERATED for path in (root / "protos").rglob(pattern))
    return {str(path.relative_to(root)): path.read_bytes() for path in paths}


def stale_files() -> list[str]:
    """Returns the generated files that a fresh run would change, add or no longer write."""
    with tempfile.TemporaryDirectory() as folder:
        generate(Path(folder))
        fresh = generated_files(Path(folder))
    present = generated_files(ROOT)
    return sorted(name for name in fresh.keys() | present.keys() if fresh.get(name) != present.get(name))


def main() -> None:
    """Generates, or checks and ends with status 1 when something is out of date."""
    parser = argparse.ArgumentParser(prog="python -m protos.generate", description=__doc__)
    parser.add_argument("--check", action="store_true", help="compare only; change nothing")
    if not parser.parse_args().check:
        generate(ROOT)
        return
    stale = stale_files()
    if stale:
        raise SystemExit(f"generated code is out of date (run make protos): {', '.join(stale)}")
    sys.stdout.write("Generated code is up to date.\n")


if __name__ == "__main__":
    main()

"""Get the Python source of the vLLM release after the installed one, for contract tests (`make vllm-next`).

Its wheel is the CUDA build, which cannot run here; its Python files can be imported over the installed packages.
"""

import shutil
import subprocess
import sys
import zipfile
from email.parser import Parser
from pathlib import Path
from tempfile import TemporaryDirectory

VERSION = "0.33.0"
FOLDER = Path(__file__).parents[2] / ".venv" / f"vllm-{VERSION}"
WHEEL_SIZE = "336 MB"


class FetchError(Exception):
    """The source could not be had; the message says what to do."""


def fetch_source(folder: Path = FOLDER) -> int:
    """Download the wheel, keep its Python files and metadata in `folder`, and return how many files that are.

    Raises:
        FetchError: the download failed, or the wheel is of another version.
    """
    print(f"Downloading the wheel of vLLM {VERSION} ({WHEEL_SIZE}), to keep its Python files only ...", flush=True)
    folder.parent.mkdir(parents=True, exist_ok=True)
    # Beside the target, so that the finished folder appears at once: half a source would look like missing symbols.
    with TemporaryDirectory(dir=folder.parent, prefix="vllm-next-") as temporary:
        num_files = extract_python(_download(Path(temporary)), Path(temporary) / "source")
        shutil.rmtree(folder, ignore_errors=True)
        (Path(temporary) / "source").rename(folder)
    print(f"Kept {num_files} files in {folder}; the wheel is deleted.", flush=True)
    return num_files


def _download(folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--disable-pip-version-check", "--quiet", "--no-deps"]
    command += ["--only-binary", ":all:", "--dest", str(folder), f"vllm=={VERSION}"]
    if subprocess.run(command, check=False).returncode != 0:
        raise FetchError(
            f"vllm=={VERSION} could not be downloaded from the package index that pip is configured with; pip says why "
            f"above. Check the index (`pip config list`) and the free space ({WHEEL_SIZE}), then run `make vllm-next` "
            "again. Everything but `make contracts` works without it."
        )
    (wheel,) = folder.glob("vllm-*.whl")
    return wheel


def extract_python(wheel: Path, folder: Path) -> int:
    """Write the Python files of package vllm and its metadata to `folder`, and return how many files that are.

    Raises:
        FetchError: the wheel is of another version.
    """
    with zipfile.ZipFile(wheel) as archive:
        (metadata,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        # A local part, as in 0.33.0+cu129, names the build.
        found = str(Parser().parsestr(archive.read(metadata).decode())["Version"]).partition("+")[0]
        if found != VERSION:
            raise FetchError(f"{wheel.name} holds vLLM {found}, but {VERSION} was asked for. Check the package index.")
        sources = [name for name in archive.namelist() if name.startswith("vllm/") and name.endswith(".py")]
        archive.extractall(folder, [*sources, metadata])
    return len(sources) + 1


if __name__ == "__main__":
    try:
        fetch_source()
    except FetchError as error:
        sys.exit(str(error))

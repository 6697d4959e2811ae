"""Fetches the images for test_corpus.py: `python tests/processors/media/corpus.py FOLDER`.

They are the test images of Pillow's source distribution: a thousand files in every format that it
knows, many of them broken on purpose. pip fetches the archive, whose hash is fixed here, and only
the images are unpacked. Does nothing where they are already. Tests never call this.
"""

from __future__ import annotations

import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

REQUIREMENT = (
    "pillow==13.0.0 "
    "--hash=sha256:cdcd1ba258178f7356d74170c9a81ba4eab6a5d55748bc402a5a2a6fe6be3510\n"
)
IMAGES = ("Tests", "images")


def fetch(folder: Path) -> bool:
    """Puts the images into the folder; False if they were there."""
    if folder.is_dir():
        return False
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as work:
        unpacked = Path(work) / "unpacked"
        unpack(download(Path(work)), unpacked)
        # Under its name only when it is whole.
        unpacked.rename(folder)
    return True


def download(work: Path) -> Path:
    """The source archive, which pip has compared with the hash."""
    requirements = work / "requirements.txt"
    requirements.write_text(REQUIREMENT)
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
    command += ["--no-deps", "--no-binary", "pillow", "--require-hashes"]
    command += ["--requirement", str(requirements), "--dest", str(work / "archive")]
    subprocess.run(command, check=True)
    (archive,) = (work / "archive").glob("*.tar.gz")
    return archive


def unpack(archive: Path, folder: Path) -> None:
    """Unpacks the images, and nothing else, without the folders above them."""
    folder.mkdir()
    with tarfile.open(archive) as tar:
        tar.extractall(folder, members=_images(tar), filter="data")


def _images(tar: tarfile.TarFile) -> Iterator[tarfile.TarInfo]:
    for member in tar:
        parts = PurePosixPath(member.name).parts
        if member.isfile() and parts[1:3] == IMAGES and len(parts) > 3:
            yield member.replace(name=str(PurePosixPath(*parts[3:])), deep=False)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python corpus.py FOLDER")
    target = Path(sys.argv[1])
    was_fetched = fetch(target)
    count = sum(path.is_file() for path in target.rglob("*"))
    sys.stdout.write(f"{count} images {'fetched into' if was_fetched else 'in'} {target}\n")

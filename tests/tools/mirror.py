"""Wheels made again from what is installed here: a package index that needs no network."""

import base64
import hashlib
import zipfile
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path


def repack(names: Iterable[str], folder: Path) -> None:
    """Put a wheel of each installed package into the folder, without what pip wrote beside it (scripts, caches)."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        _repack(metadata.distribution(name), folder)


def link(names: Iterable[str], folder: Path) -> None:
    """Show the files of these installed packages in another folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        distribution = metadata.distribution(name)
        for top in {file.parts[0] for file in distribution.files if ".." not in file.parts}:
            if not (folder / top).exists():
                (folder / top).symlink_to(distribution.locate_file(top))


def _repack(distribution: metadata.Distribution, folder: Path) -> None:
    info = next(file.parts[0] for file in distribution.files if file.parts[0].endswith(".dist-info"))
    record = []
    with zipfile.ZipFile(folder / f"{info.removesuffix('.dist-info')}-{_tag(distribution)}.whl", "w") as archive:
        for file in distribution.files:
            written = {f"{info}/{one}" for one in ("RECORD", "INSTALLER", "REQUESTED", "direct_url.json")}
            if ".." in file.parts or "__pycache__" in file.parts or str(file) in written:
                continue
            data = file.locate().read_bytes()
            digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
            record.append(f"{file},sha256={digest},{len(data)}\n")
            archive.writestr(str(file), data)
        archive.writestr(f"{info}/RECORD", "".join(record) + f"{info}/RECORD,,\n")


def _tag(distribution: metadata.Distribution) -> str:
    """Python, ABI and platforms as a wheel's name has them: of a pair of platforms, all together."""
    lines = (distribution.read_text("WHEEL") or "").splitlines()
    tags = [line.removeprefix("Tag: ").split("-") for line in lines if line.startswith("Tag: ")]
    return "-".join(".".join(sorted({tag[place] for tag in tags})) for place in range(3))

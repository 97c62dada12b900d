"""The manifest of a folder: size and SHA-256 of every file, so that damage is named before anything is read."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

from lucidrl.errors import CheckpointError

MANIFEST_NAME = "manifest.json"
FORMAT_VERSION = 1


def write_manifest(folder: Path) -> None:
    """Describe every file below `folder` in its `manifest.json`.

    Raises:
        CheckpointError: for a symbolic link or special file; only regular files and folders may be kept.
    """
    files = {
        str(name): {"size_bytes": path.stat().st_size, "sha256": _sha256(path)}
        for name, path in sorted(_regular_files(folder))
    }
    content = {"format_version": FORMAT_VERSION, "files": files}
    (folder / MANIFEST_NAME).write_text(json.dumps(content, indent=1) + "\n")


def verify_manifest(folder: Path) -> None:
    """Check that `folder` holds exactly the files of its manifest, unchanged.

    Raises:
        CheckpointError: names the first file that is wrong and says why.
    """
    listed = _read_manifest(folder)
    present = dict(_regular_files(folder))
    for name, expected in listed.items():
        relative = PurePosixPath(name)
        if relative.is_absolute() or ".." in relative.parts:
            raise _damage(folder, name, "its listed path leaves the folder")
        if relative not in present:
            raise _damage(folder, name, "it is missing")
        size_bytes = present[relative].stat().st_size
        if size_bytes != expected["size_bytes"]:
            raise _damage(folder, name, f"it has {size_bytes} bytes instead of {expected['size_bytes']}")
        if _sha256(present[relative]) != expected["sha256"]:
            raise _damage(folder, name, "its content does not match its SHA-256")
    for relative in present:
        if str(relative) not in listed:
            raise _damage(folder, str(relative), "it is not listed in the manifest")


def _read_manifest(folder: Path) -> dict[str, dict[str, Any]]:
    try:
        content = json.loads((folder / MANIFEST_NAME).read_text())
        version, files = content["format_version"], content["files"]
        well_formed = all(isinstance(entry["size_bytes"], int) and "sha256" in entry for entry in files.values())
    except FileNotFoundError:
        raise _damage(folder, MANIFEST_NAME, "it is missing") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise _damage(folder, MANIFEST_NAME, f"it is not a readable manifest ({error!r})") from error
    if version != FORMAT_VERSION:
        raise CheckpointError(
            f"checkpoint {folder} has format version {version!r}, this release reads {FORMAT_VERSION}; "
            "use the release of lucidrl that wrote it"
        )
    if not well_formed:
        raise _damage(folder, MANIFEST_NAME, "an entry has no whole number as its size")
    return files


def _regular_files(folder: Path) -> Iterator[tuple[PurePosixPath, Path]]:
    """(path relative to `folder`, path) of every file below it, except its own manifest."""
    for parent, subfolders, files in os.walk(folder, onerror=_reraise):
        for name in (*subfolders, *files):
            path = Path(parent, name)
            relative = PurePosixPath(path.relative_to(folder).as_posix())
            if path.is_symlink():
                raise _damage(folder, str(relative), "it is a symbolic link")
            if name in files and not path.is_file():
                raise _damage(folder, str(relative), "it is not a regular file")
            if name in files and relative != PurePosixPath(MANIFEST_NAME):
                yield relative, path


def _reraise(error: OSError) -> None:
    raise error


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _damage(folder: Path, name: str, reason: str) -> CheckpointError:
    return CheckpointError(f"checkpoint {folder} cannot be used: {name}: {reason}; restore the file or use another one")

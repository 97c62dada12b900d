"""The manifest of a folder: size and SHA-256 of every file, to detect damage before reading."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from lucidrl.errors import CheckpointError

MANIFEST_NAME = "manifest.json"
FORMAT_VERSION = 2


@dataclass(frozen=True)
class FileDigest:
    """Size and hash of a file."""

    size_bytes: int
    sha256: str


def write_manifest(folder: Path, digests: Mapping[Path, FileDigest] | None = None) -> None:
    """Write `manifest.json` with every file below `folder`.

    Args:
        digests: digests of files that were hashed while they were written; all other files are read and hashed.

    Raises:
        CheckpointError: for a symbolic link, a special file, or a file whose size differs from its digest.
    """
    known = {PurePosixPath(path.relative_to(folder).as_posix()): digest for path, digest in (digests or {}).items()}
    files = {}
    for name, path in sorted(_regular_files(folder)):
        digest = known.pop(name, None) or FileDigest(path.stat().st_size, _sha256(path))
        _check_size(folder, str(name), path, digest.size_bytes)
        files[str(name)] = asdict(digest)
    for name in known:
        raise _damage(folder, str(name), "it was written, but is missing")
    content = {"format_version": FORMAT_VERSION, "files": files}
    (folder / MANIFEST_NAME).write_text(json.dumps(content, indent=1) + "\n")


def verify_manifest(folder: Path, below: str = "") -> None:
    """Check that `folder` has exactly the files of its manifest, unchanged.

    Args:
        below: check only the files in this subfolder of `folder`.

    Raises:
        CheckpointError: with the first wrong file and the reason.
    """
    # List the files before opening the manifest, to refuse a link or a pipe in its place.
    present = {name: path for name, path in _regular_files(folder) if name.is_relative_to(below)}
    listed = _read_manifest(folder)
    for name, expected in listed.items():
        relative = PurePosixPath(name)
        if relative.is_absolute() or ".." in relative.parts:
            raise _damage(folder, name, "its listed path leaves the folder")
        if not relative.is_relative_to(below):
            continue
        if relative not in present:
            raise _damage(folder, name, "it is missing")
        _check_size(folder, name, present[relative], expected["size_bytes"])
        if _sha256(present[relative]) != expected["sha256"]:
            raise _damage(folder, name, "its content does not match its SHA-256")
    for relative in present:
        if str(relative) not in listed:
            raise _damage(folder, str(relative), "it is not listed in the manifest")


def is_as_listed(folder: Path) -> bool:
    """Whether `folder` has the files of its manifest and no others; does not check their content.

    Raises:
        CheckpointError: if it has no readable manifest, or has a link or a special file.
    """
    present = {str(name) for name, _ in _regular_files(folder)}
    return present == set(_read_manifest(folder))


def listed_files(folder: Path) -> dict[PurePosixPath, FileDigest]:
    """The files of a manifest, by path relative to `folder`; does not check them."""
    return {
        PurePosixPath(name): FileDigest(entry["size_bytes"], entry["sha256"])
        for name, entry in _read_manifest(folder).items()
    }


def read_json(folder: Path, name: str) -> Any:
    """The content of an untrusted JSON file.

    Raises:
        CheckpointError: if it is missing, is not a regular file, or is not JSON.
    """
    path = folder / name
    if not path.is_file():
        raise _damage(folder, name, "it is not a regular file" if path.exists() else "it is missing")
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise _damage(folder, name, f"it is not readable JSON ({error!r})") from error


def _read_manifest(folder: Path) -> dict[str, dict[str, Any]]:
    content = read_json(folder, MANIFEST_NAME)
    try:
        version, files = content["format_version"], content["files"]
        well_formed = all(isinstance(entry["size_bytes"], int) and "sha256" in entry for entry in files.values())
    except (KeyError, TypeError, AttributeError) as error:
        raise _damage(folder, MANIFEST_NAME, f"it is not a manifest ({error!r})") from error
    if version != FORMAT_VERSION:
        raise CheckpointError(
            f"checkpoint {folder} has format version {version!r}, this release reads {FORMAT_VERSION}; "
            "use the release of lucidrl that wrote it"
        )
    if not well_formed:
        raise _damage(folder, MANIFEST_NAME, "an entry has no integer size, or no SHA-256")
    return files


def _check_size(folder: Path, name: str, path: Path, expected_bytes: int) -> None:
    size_bytes = path.stat().st_size
    if size_bytes != expected_bytes:
        raise _damage(folder, name, f"it has {size_bytes} bytes instead of {expected_bytes}")


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

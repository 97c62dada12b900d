"""Copies of a git work tree for a run: the text files that git tracks, without those that may hold secrets."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path, PurePosixPath

_MOST_BYTES = 1_000_000
_GIT_TIMEOUT_S = 30

# Matched against every part of a path, in lower case. Leaving out too much does no harm.
_SECRET = re.compile(
    r"\.env.*|.*\.env|.*(credential|secret|password).*|[._]netrc|\.(pypirc|npmrc|htpasswd|ssh|aws)|kubeconfig.*"
    r"|id_(rsa|dsa|ecdsa|ed25519).*|.*\.(pem|key|p12|pfx|jks|keystore|kdbx)",
    re.DOTALL,
)


def tracked_text_files(root: Path) -> dict[str, bytes]:
    """Contents of the tracked files below `root`, by relative path.

    Leaves out files with names of secrets, larger than 1 MB, not in UTF-8, or behind a symbolic link.

    Raises:
        OSError, subprocess.SubprocessError: `root` is not in a git work tree, or git is missing or fails.
    """
    contents = {name: _text_of(root, name) for name in _names(root, "ls-files")}
    return {name: content for name, content in contents.items() if content is not None}


def uncommitted_diff(root: Path) -> bytes:
    """The changes since the last commit in the files of `tracked_text_files`; raises the same errors.

    A deleted file appears without its old content.
    """
    # Ignore diff helpers and settings of the user's git.
    diff = ("diff", "HEAD", "--relative", "--no-renames", "--no-ext-diff", "--no-textconv", "--irreversible-delete")
    changed = [name for name in _names(root, *diff, "--name-only") if _may_be_shown(root, name)]
    if not changed:
        return b""
    return git(root, "--literal-pathspecs", *diff, "--no-color", "--", *changed)


def _may_be_shown(root: Path, name: str) -> bool:
    if (root / name).is_symlink() or (root / name).exists():
        return _text_of(root, name) is not None
    return not _is_secret(name)


def _text_of(root: Path, name: str) -> bytes | None:
    """Content of the file `name`, or None if it is left out."""
    path = root.resolve() / name
    if _is_secret(name) or path.resolve() != path or not path.is_file() or path.stat().st_size > _MOST_BYTES:
        return None
    content = path.read_bytes()
    try:
        content.decode("utf-8")
    except UnicodeDecodeError:
        return None
    return None if b"\0" in content else content


def _is_secret(name: str) -> bool:
    return any(_SECRET.fullmatch(part.lower()) for part in PurePosixPath(name).parts)


def _names(root: Path, *arguments: str) -> list[str]:
    return [name.decode("utf-8", "surrogateescape") for name in git(root, *arguments, "-z").split(b"\0") if name]


def git(root: Path, *arguments: str) -> bytes:
    """Output of a git command; raises the errors of `tracked_text_files`."""
    # Take no locks: they would block the user's git commands.
    command = ["git", "-C", str(root), "--no-optional-locks", *arguments]
    return subprocess.run(command, check=True, capture_output=True, timeout=_GIT_TIMEOUT_S).stdout

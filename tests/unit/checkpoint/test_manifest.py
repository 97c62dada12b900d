"""Verifying a manifest finds every changed, missing or unexpected file."""

import json
import os

import pytest

from lucidrl.checkpoint.manifest import FORMAT_VERSION, FileDigest, verify_manifest, write_manifest
from lucidrl.errors import CheckpointError


@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / "step_1"
    (folder / "weights").mkdir(parents=True)
    (folder / "weights" / "a.bin").write_bytes(b"aaaa")
    (folder / "weights" / "manifest.json").write_text("not ours, only named alike")
    (folder / "state.json").write_text("{}")
    write_manifest(folder)
    return folder


def edit_manifest(folder, change):
    content = json.loads((folder / "manifest.json").read_text())
    change(content)
    (folder / "manifest.json").write_text(json.dumps(content))


def test_an_unchanged_folder_is_accepted(folder):
    verify_manifest(folder)


def test_a_changed_byte_is_found(folder):
    (folder / "weights" / "a.bin").write_bytes(b"aaba")
    with pytest.raises(CheckpointError, match=r"weights/a\.bin: .*SHA-256"):
        verify_manifest(folder)


def test_a_truncated_file_is_found(folder):
    (folder / "weights" / "a.bin").write_bytes(b"aaa")
    with pytest.raises(CheckpointError, match=r"weights/a\.bin: it has 3 bytes instead of 4"):
        verify_manifest(folder)


def test_a_missing_file_is_found(folder):
    (folder / "weights" / "a.bin").unlink()
    with pytest.raises(CheckpointError, match=r"weights/a\.bin: it is missing"):
        verify_manifest(folder)


@pytest.mark.parametrize("name", ["extra.bin", "weights/extra.bin"])
def test_a_file_that_is_not_listed_is_refused(folder, name):
    (folder / name).touch()
    with pytest.raises(CheckpointError, match=r"extra\.bin: it is not listed"):
        verify_manifest(folder)


def test_a_symbolic_link_is_refused_even_to_the_same_content(folder, tmp_path):
    (folder / "weights" / "a.bin").rename(tmp_path / "outside.bin")
    (folder / "weights" / "a.bin").symlink_to(tmp_path / "outside.bin")
    with pytest.raises(CheckpointError, match=r"weights/a\.bin: it is a symbolic link"):
        verify_manifest(folder)


def test_a_linked_folder_is_refused(folder, tmp_path):
    (folder / "more").symlink_to(tmp_path)
    with pytest.raises(CheckpointError, match="more: it is a symbolic link"):
        verify_manifest(folder)


def test_a_special_file_is_refused_without_being_opened(folder):
    os.mkfifo(folder / "pipe")
    with pytest.raises(CheckpointError, match="pipe: it is not a regular file"):
        verify_manifest(folder)


@pytest.mark.parametrize("name", ["../outside.bin", "/etc/hostname", "weights/../../outside.bin"])
def test_a_listed_path_that_leaves_the_folder_is_refused(folder, name):
    edit_manifest(folder, lambda content: content["files"].update({name: {"size_bytes": 1, "sha256": ""}}))
    with pytest.raises(CheckpointError, match="leaves the folder"):
        verify_manifest(folder)


def test_another_format_version_is_refused(folder):
    edit_manifest(folder, lambda content: content.update(format_version=99))
    with pytest.raises(CheckpointError, match="format version 99"):
        verify_manifest(folder)


@pytest.mark.parametrize(
    "text", ["", "[]", "{", '{"format_version": V}', '{"format_version": V, "files": {"a": 3}}', "[" * 100_000]
)
def test_a_damaged_manifest_is_refused(folder, text):
    (folder / "manifest.json").write_text(text.replace("V", str(FORMAT_VERSION)))
    with pytest.raises(CheckpointError, match=r"manifest\.json"):
        verify_manifest(folder)


def test_a_missing_manifest_is_refused(folder):
    (folder / "manifest.json").unlink()
    with pytest.raises(CheckpointError, match=r"manifest\.json: it is missing"):
        verify_manifest(folder)


def test_a_pipe_in_place_of_the_manifest_is_refused_without_being_opened(folder):
    (folder / "manifest.json").unlink()
    os.mkfifo(folder / "manifest.json")
    with pytest.raises(CheckpointError, match=r"manifest\.json: it is not a regular file"):
        verify_manifest(folder)


def test_a_subfolder_is_verified_alone(folder):
    (folder / "state.json").write_text("changed")
    verify_manifest(folder, below="weights")
    (folder / "weights" / "a.bin").write_bytes(b"aaba")
    with pytest.raises(CheckpointError, match=r"weights/a\.bin"):
        verify_manifest(folder, below="weights")


def test_known_digests_are_used_and_the_other_files_are_read(folder):
    write_manifest(folder, {folder / "weights" / "a.bin": FileDigest(4, "known")})
    files = json.loads((folder / "manifest.json").read_text())["files"]
    assert files["weights/a.bin"] == {"size_bytes": 4, "sha256": "known"}
    assert len(files["state.json"]["sha256"]) == 64


@pytest.mark.parametrize(("name", "complaint"), [("a.bin", "it has 4 bytes instead of 5"), ("b.bin", "but is missing")])
def test_a_digest_of_another_file_than_the_one_there_is_refused(folder, name, complaint):
    with pytest.raises(CheckpointError, match=complaint):
        write_manifest(folder, {folder / "weights" / name: FileDigest(5, "known")})

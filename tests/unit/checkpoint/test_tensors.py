"""The safetensors library reads our files bit-exactly, and digests match the files."""

import hashlib

import pytest
import torch
from safetensors.torch import load_file, safe_open

from lucidrl.checkpoint.tensors import TensorFile, TensorSpec
from lucidrl.errors import CheckpointError

DTYPES = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2,
    torch.complex64, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.uint16, torch.bool,
]  # fmt: skip


def file_of(tensors, memory=None):
    file = TensorFile({name: TensorSpec.of(tensor) for name, tensor in tensors.items()}, memory)
    for name, tensor in tensors.items():
        file.fill(name, tensor)
    return file


def test_every_dtype_comes_back_bit_exactly_from_one_file(tmp_path):
    tensors = {str(dtype): torch.tensor([0, 1, 1, 0, 1, 3, 1]).to(dtype) for dtype in DTYPES}
    file_of(tensors).write(tmp_path / "x.safetensors")
    loaded = load_file(tmp_path / "x.safetensors")
    assert loaded.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert loaded[name].dtype == tensor.dtype
        assert torch.equal(loaded[name].view(torch.uint8), tensor.view(torch.uint8))


def test_scalars_empty_tensors_and_odd_names_are_kept(tmp_path):
    tensors = {"scalar": torch.tensor(3.5), "empty": torch.empty(0, 4), 'ünlaut "quoted"': torch.ones(3, 1, 2)}
    file_of(tensors).write(tmp_path / "x.safetensors")
    loaded = load_file(tmp_path / "x.safetensors")
    assert all(torch.equal(loaded[name], tensor) for name, tensor in tensors.items())
    assert loaded["scalar"].shape == ()


def test_tensors_of_other_layout_and_precision_are_converted_as_they_are_copied(tmp_path):
    file = TensorFile({"x": TensorSpec(torch.bfloat16, (3, 4))})
    matrix = torch.randn(4, 3)
    file.fill("x", matrix.T)
    file.write(tmp_path / "x.safetensors")
    assert torch.equal(load_file(tmp_path / "x.safetensors")["x"], matrix.T.bfloat16())


def test_the_digest_is_that_of_the_file_and_transformers_finds_its_format(tmp_path):
    file = file_of({"x": torch.randn(3_000_000)})  # more than is written at a time
    digest = file.write(tmp_path / "x.safetensors")
    content = (tmp_path / "x.safetensors").read_bytes()
    assert digest.sha256 == hashlib.sha256(content).hexdigest()
    assert digest.size_bytes == file.size_bytes == len(content)
    with safe_open(tmp_path / "x.safetensors", framework="pt") as opened:
        assert opened.metadata() == {"format": "pt"}


@pytest.mark.parametrize(
    "see", [lambda x: x[1], lambda x: x.T, lambda x: x[:, 2], torch.conj, torch.Tensor.requires_grad_]
)
def test_views_are_stored_as_they_are_seen(tmp_path, see):
    tensor = see(torch.complex(torch.arange(12.0), torch.ones(12)).reshape(3, 4))
    file_of({"x": tensor}).write(tmp_path / "x.safetensors")
    assert torch.equal(load_file(tmp_path / "x.safetensors")["x"], tensor)


def test_memory_of_the_right_size_is_reused(tmp_path):
    first = file_of({"x": torch.ones(5)})
    again = file_of({"y": torch.zeros(5)}, first.memory)
    assert again.memory is first.memory
    assert file_of({"y": torch.zeros(6)}, first.memory).memory is not first.memory


def test_an_existing_file_is_not_overwritten(tmp_path):
    (tmp_path / "x.safetensors").write_text("mine")
    with pytest.raises(FileExistsError):
        file_of({"x": torch.ones(1)}).write(tmp_path / "x.safetensors")


def test_an_unsupported_dtype_is_named():
    with pytest.raises(CheckpointError, match=r"momentum has dtype torch\.complex128"):
        TensorFile({"momentum": TensorSpec(torch.complex128, (2,))})

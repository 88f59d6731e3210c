"""Sentences → token ids, against the tokenizer's own answers, with a tokenizer that adds nothing and one whose
post-processor adds BOS and EOS.

Regimes: BOS as the tokenizer does, forced and forbidden; truncation without a template (the tokenizer's own) and with
one (the text is cut, its surroundings never: with `eol` the last token stays the closing quote); texts that look like a
template; other columns; random Unicode, which is cut between the bytes of a character if anything is.
"""

from __future__ import annotations

from functools import cache
from typing import Any, Literal

import numpy as np
import pytest
import tiny_models
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from permafrost.extractor.config import TEMPLATES
from permafrost.extractor.errors import InputError, UsageError
from permafrost.extractor.tokens import TextEncoder, render, template_fields

BOS, EOS = 1, 2
EOL, ECHO = TEMPLATES["eol"], TEMPLATES["echo"]
SENTENCES = [
    "The cat sat on the mat.",
    "a",
    "Birds have feathers, and fish swim.",
    "naïve 猫 🧊",
    " two  spaces ",
    "\n",
]
LONG = "The cat sat on the mat and the dog ran after the cat in the rain. " * 10
texts = st.text(min_size=1, max_size=60)
patient = settings(deadline=None)


@cache
def plain() -> Any:
    """Adds no special token, as GPT-2's."""
    return tiny_models.tokenizer()


@cache
def framed() -> Any:
    """Begins with BOS and ends with EOS."""
    tokenizer = tiny_models.tokenizer()
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A <eos>", special_tokens=[("<bos>", BOS), ("<eos>", EOS)]
    )
    return tokenizer


def letters_only() -> Any:
    """Drops all but letters: some texts give no token."""
    backend = Tokenizer(models.WordLevel({"<pad>": 0, "<bos>": BOS, "cat": 3}, unk_token="<pad>"))
    backend.normalizer = normalizers.Replace(Regex("[^a-z ]"), "")
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<bos>")


def ids_of(encoder: TextEncoder, text: str, *fields: str) -> list[int]:
    encoded = encoder.encode([text], [fields] if fields else ())
    assert encoded.lengths.tolist() == [len(encoded.ids)]
    return [int(i) for i in encoded.ids]


both = pytest.mark.parametrize("tokenizer", [plain, framed])


@both
def test_ids_are_the_tokenizers_own(tokenizer: Any) -> None:
    encoded = TextEncoder(tokenizer(), 512).encode(SENTENCES)
    own = tokenizer()(SENTENCES)["input_ids"]
    assert [encoded.sentence(i).tolist() for i in range(len(SENTENCES))] == own
    assert encoded.lengths.tolist() == [len(ids) for ids in own]
    assert encoded.bounds.tolist() == [0, *np.cumsum(encoded.lengths).tolist()]
    assert not encoded.truncated.any()


@pytest.mark.parametrize(
    ("tokenizer", "bos", "before", "after"),
    [
        (plain, "auto", [], []),
        (plain, "yes", [BOS], []),
        (plain, "no", [], []),
        (framed, "auto", [BOS], [EOS]),
        (framed, "yes", [BOS], [EOS]),
        (framed, "no", [], [EOS]),
    ],
)
def test_bos_is_added_as_asked_once_at_most(
    tokenizer: Any, bos: Literal["auto", "yes", "no"], before: list[int], after: list[int]
) -> None:
    encoder = TextEncoder(tokenizer(), 512, bos=bos)
    body = plain()("The cat.")["input_ids"]
    assert ids_of(encoder, "The cat.") == [*before, *body, *after]
    assert encoder.has_bos is (before == [BOS])


def test_a_tokenizer_without_bos_cannot_be_asked_for_it() -> None:
    tokenizer = tiny_models.tokenizer()
    tokenizer.bos_token = None
    with pytest.raises(UsageError, match="--bos yes: this tokenizer has no BOS token"):
        TextEncoder(tokenizer, 512, bos="yes")
    assert TextEncoder(tokenizer, 512).has_bos is False


def test_the_fingerprint_tells_tokenizers_and_bos_apart() -> None:
    encoders = [TextEncoder(plain(), 64), TextEncoder(plain(), 64, bos="yes"), TextEncoder(framed(), 64)]
    encoders.append(TextEncoder(tiny_models.tokenizer(290), 64))
    assert len({encoder.fingerprint() for encoder in encoders}) == len(encoders)
    assert TextEncoder(tiny_models.tokenizer(), 64).fingerprint() == encoders[0].fingerprint()


@both
@pytest.mark.parametrize("most", [3, 4, 7, 30])
def test_truncation_without_a_template_is_the_tokenizers_own(tokenizer: Any, most: int) -> None:
    encoded = TextEncoder(tokenizer(), most).encode([*SENTENCES, LONG])
    whole = tokenizer()([*SENTENCES, LONG])["input_ids"]
    own = tokenizer()([*SENTENCES, LONG], truncation=True, max_length=most)["input_ids"]
    assert [encoded.sentence(i).tolist() for i in range(len(own))] == own
    assert encoded.truncated.tolist() == [len(ids) > most for ids in whole]


@both
@patient
@given(batch=st.lists(texts, min_size=1, max_size=5), most=st.integers(3, 40))
def test_no_sentence_is_longer_than_max_tokens_and_the_flag_says_which_were(
    tokenizer: Any, batch: list[str], most: int
) -> None:
    encoded = TextEncoder(tokenizer(), most).encode(batch)
    whole = tokenizer()(batch)["input_ids"]
    assert encoded.lengths.tolist() == [min(len(ids), most) for ids in whole]
    assert encoded.truncated.tolist() == [len(ids) > most for ids in whole]


# Templates


@both
@patient
@given(text=texts, most=st.integers(24, 70), template=st.sampled_from([EOL, ECHO, "Q: {text}\nA:", "{text}."]))
def test_a_template_is_rendered_whole_and_only_its_text_is_cut(
    tokenizer: Any, text: str, most: int, template: str
) -> None:
    encoder = TextEncoder(tokenizer(), max(most, len(tokenizer()(template)["input_ids"])), template)
    whole = tokenizer()(render(template, text, {}))["input_ids"]
    encoded = encoder.encode([text])
    assert encoded.truncated.tolist() == [len(whole) > encoder.max_tokens]
    assert len(encoded.ids) <= encoder.max_tokens
    cut_texts = (text[:n] for n in range(len(text), 0, -1))
    assert any(tokenizer()(render(template, cut, {}))["input_ids"] == encoded.ids.tolist() for cut in cut_texts)


@both
@pytest.mark.parametrize("most", [45, 46, 60, 127])
def test_head_and_tail_of_a_template_survive_truncation(tokenizer: Any, most: int) -> None:
    head, tail = EOL.split("{text}")
    encoder = TextEncoder(tokenizer(), most, EOL)
    ids = ids_of(encoder, LONG)
    shown = plain().decode(ids, skip_special_tokens=True)
    assert most - 3 <= len(ids) <= most
    assert shown.startswith(head) and shown.endswith(tail)
    assert LONG.startswith(shown.removeprefix(head).removesuffix(tail))
    last = ids[-2] if tokenizer is framed else ids[-1]
    assert plain().decode([last]).endswith('"')


@pytest.mark.parametrize("most", [9, 24, 65])
def test_echo_shortens_both_copies_alike(most: int) -> None:
    shown = plain().decode(ids_of(TextEncoder(plain(), most, ECHO), LONG))
    half = (len(shown) - 1) // 2
    assert half > 0 and shown == f"{shown[:half]} {shown[:half]}"
    assert LONG.startswith(shown[:half])


@pytest.mark.parametrize(
    "text", ["{text}", "{label}", "a {text} b {label}", "{", "}{", "{0} %s \\1 \\g<0>", "{{text}}"]
)
def test_a_text_that_looks_like_a_template_stays_literal(text: str) -> None:
    encoder = TextEncoder(plain(), 512, "<{label}|{text}>")
    assert plain().decode(ids_of(encoder, text, "{text}")) == "<{text}|" + text + ">"


def test_other_columns_fill_in_and_are_never_cut() -> None:
    template = "{kind} about {topic}: {text} ({kind})"
    encoder = TextEncoder(plain(), 40, template)
    assert encoder.fields == ("kind", "topic") == template_fields(template)
    encoded = encoder.encode(["Cats sit.", LONG], [("Fact", "cats"), ("Tale", "dogs")])
    assert plain().decode(encoded.sentence(0)) == "Fact about cats: Cats sit. (Fact)"
    assert encoded.truncated.tolist() == [False, True]
    cut = plain().decode(encoded.sentence(1))
    assert cut.startswith("Tale about dogs: The cat") and cut.endswith(" (Tale)")


def test_columns_that_leave_no_room_for_text_are_refused() -> None:
    encoder = TextEncoder(plain(), 20, "{topic}: {text}")
    with pytest.raises(InputError, match=r"fields take \d+ tokens, --max-tokens leaves 20"):
        encoder.encode([LONG], [(LONG,)])


@pytest.mark.parametrize("template", ["{text}", EOL, ECHO])
def test_a_limit_without_room_for_text_is_refused(template: str) -> None:
    frame = len(framed()(template.replace("{text}", ""))["input_ids"])
    with pytest.raises(UsageError, match=f"--max-tokens {frame} leaves no room for text: .* takes {frame}"):
        TextEncoder(framed(), frame, template)
    assert len(ids_of(TextEncoder(framed(), frame + 4, template), LONG)) <= frame + 4


def test_a_cut_text_keeps_something_of_the_text_or_is_refused() -> None:
    """One character of several tokens, where two copies of it do not fit: a vector of the template alone is no
    sentence's vector."""
    encoder = TextEncoder(plain(), 3, ECHO)
    with pytest.raises((InputError, UsageError)):
        encoder.encode(["🧊"])


# Texts without tokens


@pytest.mark.parametrize("text", ["", "123", "!?"])
def test_a_text_without_tokens_is_refused_unless_something_stands_around_it(text: str) -> None:
    tokenizer = letters_only()
    with pytest.raises(InputError, match="gives no token with this tokenizer"):
        TextEncoder(tokenizer, 8).encode(["cat", text])
    assert ids_of(TextEncoder(tokenizer, 8, bos="yes"), text) == [BOS]
    assert ids_of(TextEncoder(tokenizer, 8, "cat {text}"), text) == [3]
    assert not TextEncoder(tokenizer, 8, bos="yes").has_tokens(text)
    assert TextEncoder(tokenizer, 8).has_tokens("cat")


def test_no_texts_give_an_empty_answer() -> None:
    encoded = TextEncoder(plain(), 8).encode([])
    assert len(encoded.ids) == len(encoded.lengths) == len(encoded.truncated) == 0
    assert encoded.truncated.dtype == np.bool_

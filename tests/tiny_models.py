"""Tiny random models of many architectures, and a tokenizer trained on the spot: no hub, milliseconds each.

`tiny(arch)` gives a causal LM in float32 with 4 blocks of width 32 and weights large enough that attention,
positions and sliding windows all matter to the result (at the default initialisation of 0.02 every token looks
nearly the same, and a packing mistake stays under any tolerance).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

VOCAB = 300
_COMMON: dict[str, object] = {"vocab_size": VOCAB, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_LLAMA = _COMMON | {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
_GPT = _COMMON | {"n_embd": 32, "n_layer": 4, "n_head": 4, "n_positions": 128}
_NEOX = _LLAMA | {"num_key_value_heads": 4}

CONFIGS: dict[str, tuple[str, dict[str, object]]] = {
    "gpt2": ("GPT2", _GPT),
    "opt": (
        "OPT",
        _COMMON
        | {
            "hidden_size": 32,
            "ffn_dim": 64,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "max_position_embeddings": 128,
            "word_embed_proj_dim": 32,
        },
    ),
    "gpt_neox": ("GPTNeoX", _NEOX),
    "gptj": ("GPTJ", _GPT | {"rotary_dim": 4}),
    "llama": ("Llama", _LLAMA),
    "mistral": ("Mistral", _LLAMA | {"sliding_window": 8, "head_dim": 8}),
    "qwen2": ("Qwen2", _LLAMA),
    "qwen3": ("Qwen3", _LLAMA | {"head_dim": 16}),
    "gemma2": ("Gemma2", _LLAMA | {"head_dim": 8, "sliding_window": 8, "query_pre_attn_scalar": 8}),
    "gemma3": ("Gemma3Text", _LLAMA | {"head_dim": 8, "sliding_window": 8, "query_pre_attn_scalar": 8}),
    "phi3": ("Phi3", _LLAMA | {"sliding_window": 8}),
    "falcon": ("Falcon", _NEOX | {"alibi": False, "new_decoder_architecture": False, "multi_query": True}),
    "bloom": ("Bloom", _COMMON | {"hidden_size": 32, "n_layer": 4, "n_head": 4}),
    "mixtral": ("Mixtral", _LLAMA | {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "mamba": ("Mamba", _COMMON | {"hidden_size": 32, "num_hidden_layers": 4, "state_size": 8}),
}


def tiny(arch: str, seed: int = 0, **changes: object) -> Any:
    """A random causal LM of this architecture, float32, in evaluation mode."""
    stem, settings = CONFIGS[arch]
    config = getattr(transformers, f"{stem}Config")(**(settings | {"initializer_range": 0.2} | changes))
    torch.manual_seed(seed)
    return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


def tokenizer(vocab: int = VOCAB) -> transformers.PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer, trained on a few sentences; every string has tokens, none is unknown."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    texts = ["The cat sat on the mat and the dog ran after the cat in the rain.", "Birds have feathers, and fish swim."]
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=["<pad>", "<bos>", "<eos>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer)
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>"
    )


def save(folder: Path, arch: str = "gpt2", seed: int = 0, **changes: object) -> Path:
    """A model folder as `save_pretrained` leaves it, with the tokenizer: what `--model FOLDER` takes."""
    tiny(arch, seed, **changes).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder

"""Right numbers, proven at load: a few real sentences, through the whole path, against plain forwards of each alone.

Whether a model can be packed is found here, by trial. Packed first; if the numbers differ, or the model does not use
the attention interface, batches of one length; if those differ too the run stops. The reference is the same loaded
model, in the same dtype, with its own attention, one sentence at a time.

Cost: one forward for each of the (8) check sentences and one or two for all of them.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from permafrost.extractor.engine import Engine, Mode, Wanted
from permafrost.extractor.errors import InputError, PermafrostError
from permafrost.extractor.hooks import capture
from permafrost.extractor.model import FrozenModel
from permafrost.extractor.reader import decode_floats
from permafrost.extractor.shards import rows_per_shard
from permafrost.extractor.store import Layout
from permafrost.extractor.tables import Sentence
from permafrost.extractor.tokens import Encoded, TextEncoder
from permafrost.extractor.transfer import Slab, stored_view
from permafrost.kernels.gather_naive import pool_naive

FUTURE_LIMIT = 0.1  # rounding stays under 0.05 even in bfloat16; seeing the future moves a state by its own size
LIMITS = {torch.float32: 1e-5, torch.float16: 1e-2, torch.bfloat16: 5e-2}


@dataclass(frozen=True)
class Parity:
    """How far the fast path lies from plain forwards: ‖a − b‖ / ‖b‖, the largest over sentences and layers."""

    mode: Mode
    error: float
    limit: float
    sentences: int
    worst_row: int
    worst_layer: str
    attention: str
    not_packed_because: str | None = None

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def check_sentences(sample: list[Sentence], encoder: TextEncoder, count: int) -> tuple[list[int], Encoded]:
    """Rows and token ids of the check: the longest, one cut to a single token, and lengths spread between."""
    encoded = encoder.encode([s.text for s in sample], [s.fields for s in sample])
    order = np.argsort(-encoded.lengths, kind="stable")
    picked = order[np.unique(np.linspace(0, len(order) - 1, min(max(count - 1, 1), len(order))).astype(int))]
    sentences = [encoded.sentence(int(i)) for i in picked]
    rows = [sample[int(i)].row for i in picked]
    if count > 1:
        sentences.append(sentences[-1][:1])
        rows.append(rows[-1])
    lengths = np.array([len(s) for s in sentences])
    return rows, Encoded(np.concatenate(sentences), lengths, np.zeros(len(lengths), bool))


def check_parity(model: FrozenModel, wanted: Wanted, rows: list[int], encoded: Encoded) -> Parity:
    """Find the mode that gives the plain forwards' numbers; raise, naming sentence, layer and error, if none does."""
    arrays = max(point.array for point in wanted.points) + 1
    reference = _reference(model, wanted, encoded, arrays)
    _check_causal(model, wanted, encoded)
    reason: str | None = None
    for mode in ("packed", "equal"):
        engine = Engine(model, wanted, mode)
        try:
            result = _fast(engine, encoded, arrays)
        except torch.cuda.OutOfMemoryError:
            raise
        except Exception as error:
            if mode == "equal":
                raise
            reason = f"{type(error).__name__}: {error}".splitlines()[0]
            continue
        if mode == "packed" and engine.attention_calls == 0:
            reason = f"{type(model.decoder).__name__} does not use transformers' attention interface"
            continue
        parity = _compare(result, reference, rows, engine, LIMITS[model.dtype], reason)
        if parity.error <= parity.limit:
            return parity
        reason = f"packed sentences differ from single ones by {parity.error:.2e}"
    raise PermafrostError(
        f"parity check failed: row {parity.worst_row}, layer {parity.worst_layer} differs from a plain forward by "
        f"{parity.error:.2e}, the limit in {model.dtype} is {parity.limit:.0e}. Nothing was stored; try "
        "--compute-dtype float32, and report the model if that fails too."
    )


def _reference(model: FrozenModel, wanted: Wanted, encoded: Encoded, arrays: int) -> NDArray[np.float32]:
    """Plain forwards, one sentence at a time, pooled in float32 [S, A, L, D]."""
    found: dict[tuple[int, int], Tensor] = {}

    def keep(array: int, layer: int, hidden: Tensor) -> None:
        bounds = torch.tensor([0, hidden.shape[0]], device=hidden.device)
        found[array, layer] = pool_naive(hidden, bounds, wanted.pool, wanted.skip_first)[0].float().cpu()

    rows = []
    with capture(model, wanted.points, wanted.layers, keep) as run:
        for i in range(len(encoded.lengths)):
            run(torch.from_numpy(encoded.sentence(i)).to(model.device)[None])
            rows.append([[found[a, k].numpy() for k in range(len(wanted.layers))] for a in range(arrays)])
    return np.array(rows)


def _check_causal(model: FrozenModel, wanted: Wanted, encoded: Encoded) -> None:
    """Raise if a token's state depends on what comes after it: the last token would then be no summary of a text."""
    ids = torch.from_numpy(encoded.sentence(0)).to(model.device)[None]
    middle = ids.shape[1] // 2
    found: list[dict[tuple[int, int], Tensor]] = []

    def keep(array: int, layer: int, hidden: Tensor) -> None:
        found[-1][array, layer] = hidden[middle - 1].float().cpu()

    if middle == 0:
        return
    with capture(model, wanted.points, wanted.layers, keep) as run:
        for part in (ids, ids[:, :middle]):
            found.append({})
            run(part)
    whole, alone = found
    if max(float((whole[key] - x).norm() / x.norm().clamp(min=1e-30)) for key, x in alone.items()) > FUTURE_LIMIT:
        raise InputError(f"{type(model.decoder).__name__} is not causal: its tokens see what comes after them")


def _fast(engine: Engine, encoded: Encoded, arrays: int) -> NDArray[np.float32]:
    """The same sentences through the engine, in one packed batch (or one for each length) [S, A, L, D]."""
    model, wanted = engine.model, engine.wanted
    dtype = str(model.dtype).removeprefix("torch.")
    sentences = len(encoded.lengths)
    width = model.decoder.config.get_text_config().hidden_size
    sites = tuple(map(str, range(arrays)))
    layout = Layout(sentences, wanted.layers, width, dtype, rows_per_shard(1, sentences), "none", sites)
    slab = Slab(layout, model.dtype, -(-sentences // 256), model.device)
    with engine.ready():
        for batch in engine.batches(encoded.lengths, int(encoded.lengths.sum())):
            engine.run(encoded, batch, slab)
    slabs = [decode_floats(stored_view(x.cpu())).swapaxes(1, 2) for x in slab.device]
    flat = [x.reshape(-1, len(wanted.layers), width)[:sentences] for x in slabs]
    return np.stack(flat, axis=1).astype(np.float32)


def _compare(
    result: NDArray[np.float32],
    reference: NDArray[np.float32],
    rows: list[int],
    engine: Engine,
    limit: float,
    reason: str | None,
) -> Parity:
    difference = np.linalg.norm((result - reference).astype(np.float64), axis=-1)
    error = difference / np.maximum(np.linalg.norm(reference.astype(np.float64), axis=-1), 1e-30)
    error = np.where(np.isfinite(error), error, np.inf)
    sentence, _, layer = np.unravel_index(int(error.argmax()), error.shape)
    worst = float(error.max())
    name = engine.wanted.layers[int(layer)]
    return Parity(engine.mode, worst, limit, len(rows), rows[int(sentence)], name, engine.attention, reason)

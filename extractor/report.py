"""Text for people: the summary of a run, what a store holds. Imports no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import yaml

from permafrost.extractor.reader import Store
from permafrost.extractor.shards import BLOCK_ROWS

if TYPE_CHECKING:
    from permafrost.extractor.run import Summary

STATISTICS_BLOCKS = 4


def size(count: float) -> str:
    """Bytes as people say them."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


def duration(seconds: float) -> str:
    """Seconds as people say them."""
    if seconds < 100:
        return f"{seconds:.1f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 100 else f"{minutes / 60:.1f} h"


def summary_text(summary: Summary) -> str:
    """The end of a run, in a few lines."""
    skipped = ", ".join(f"{count} {why}" for why, count in summary.skipped.items()) or "none"
    lines = [
        f"{summary.store}: {summary.state}",
        f"  rows        {summary.rows:,} from {summary.lines:,} lines ({summary.duplicates:,} duplicates; skipped: "
        f"{skipped}; truncated: {summary.truncated:,})",
        f"  size        {size(summary.store_bytes)}",
    ]
    if summary.computed:
        spent = ", ".join(f"{name} {duration(t)}" for name, t in summary.seconds.items())
        bound = ", ".join(
            f"{name} {share:.0%}" for name, share in sorted(summary.bound_by.items(), key=lambda x: -x[1])
        )
        rates = f"{summary.sentences_per_second:,.1f} sentences/s, {summary.tokens_per_second:,.0f} tokens/s"
        lines += [
            f"  speed       {rates}, {summary.gigabytes_per_second:.3f} GB/s ({summary.computed:,} rows in this run)",
            f"  time        {spent}",
            f"  bound by    {bound}",
        ]
    if summary.parity:
        lines.append(f"  parity      {parity_text(summary.parity)}")
    return "\n".join(lines)


def parity_text(parity: dict[str, Any]) -> str:
    how = "packed" if parity["mode"] == "packed" else "in batches of one length"
    return f"{how}: within {parity['error']:.1e} of plain forwards (limit {parity['limit']:.0e})"


def layer_statistics(store: Store, site: str) -> tuple[int, list[dict[str, Any]]]:
    """For each layer, over up to four row blocks spread over the store: rows used, and norms, mean, deviation, peak."""
    starts = np.unique(np.linspace(0, max(0, store.rows - BLOCK_ROWS), STATISTICS_BLOCKS).astype(int))
    spans = [(int(start), min(int(start) + BLOCK_ROWS, store.rows)) for start in starts]
    rows = sum(stop - start for start, stop in spans)
    found = []
    for layer in store.layers:
        values = np.concatenate([store.read(a, b, [layer], site)[:, 0] for a, b in spans]).astype(np.float64)
        norms = np.linalg.norm(values, axis=1)
        found.append(
            {
                "layer": layer,
                "norm": float(norms.mean()),
                "norm_deviation": float(norms.std()),
                "mean": float(values.mean()),
                "deviation": float(values.std()),
                "peak": float(np.abs(values).max()),
            }
        )
    return rows, found


def info(store: Store) -> dict[str, Any]:
    """What the store holds, where it came from, and statistics of each layer (of a complete store)."""
    document: dict[str, Any] = {"store": str(store.path), **store.attributes}
    if store.complete:
        statistics = {site: layer_statistics(store, site) for site in store.layout.sites}
        document["statistics"] = {site: found for site, (_, found) in statistics.items()}
        document["statistics_rows"] = next(iter(statistics.values()))[0]
    return document


def info_text(document: dict[str, Any]) -> str:
    layout, meaning, names, counts = (document[key] for key in ("layout", "meaning", "names", "counts"))
    state = "complete" if document["complete"] else "not complete: run the command that made it again to finish it"
    layers = layout["layers"]
    shown = ",".join(layers) if len(layers) < 8 else f"{layers[0]} … {layers[-1]}"
    skipped = ", ".join(f"{count} {why}" for why, count in counts["skipped"].items()) or "none"
    revision = f", revision {names['revision'][:12]}" if names["revision"] else ""
    tokens = f"{counts['tokens']:,}, {counts['truncated']:,} rows cut" if document["complete"] else "not counted yet"
    first = " without the first token" if meaning["skip_first"] else ""
    lines = [
        f"{document['store']}: {state}",
        f"  holds       {layout['rows']:,} rows × {len(layers)} layers ({shown}) × {layout['width']}, "
        f"{layout['dtype']}, {', '.join(layout['sites'])}",
        f"  corpus      {' '.join(filter(None, (names['corpus'], meaning['split'])))}: {counts['lines']:,} lines, "
        f"{counts['duplicates']:,} duplicates, skipped {skipped}",
        f"  model       {names['model']}{revision}, weights {meaning['model'][:12]}",
        f"  tokens      {tokens}; at most {meaning['max_tokens']} a row, BOS {'yes' if meaning['bos'] else 'no'}, "
        f"template {meaning['template']!r}, pool {meaning['pool']}{first}",
        f"  computed    in {meaning['compute_dtype']}, codec {layout['codec']}, {layout['shard_rows']:,} rows a shard",
    ]
    lines += [
        f"  machine     {m['device']}, torch {m['torch']}, {m['attention']} (shards {m['shards']})"
        for m in document.get("machines", [])
    ]
    if document.get("parity"):
        lines.append(f"  parity      {parity_text(document['parity'])}")
    for site, rows in document.get("statistics", {}).items():
        lines += [f"  {site}, over {document['statistics_rows']:,} rows:"]
        lines += [f"    {'layer':>6} {'norm':>10} {'± ':>10} {'mean':>10} {'deviation':>10} {'peak':>10}"]
        lines += [
            f"    {r['layer']:>6} {r['norm']:>10.2f} {r['norm_deviation']:>10.2f} {r['mean']:>10.4f} "
            f"{r['deviation']:>10.4f} {r['peak']:>10.2f}"
            for r in rows
        ]
    return "\n".join(lines)


def config_text(store: Store) -> str:
    """The config that made the store, as YAML that `--config` takes."""
    return str(yaml.safe_dump(store.attributes["config"], sort_keys=False, allow_unicode=True)).rstrip()

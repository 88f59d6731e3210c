"""Writing and reading a store against plain file I/O of the same bytes.

Writing: `write_shard` for several shards of a gpt2-medium-shaped store (24 layers × 1024, bfloat16 of random normal
numbers), checksums, row arrays, records and all fsyncs included, against one file a shard of the same number of
bytes: write, fsync, rename, fsync the folder. The ratio is of bytes a second; 0.7 or more is wanted.

Reading: one layer of all rows through `Store.read(…, stored=True)`, which checks each chunk's CRC32C, against
`np.fromfile` of just that layer's bytes from one flat file; 1.5 times its seconds or less is wanted. Likewise as
float32 (`Store.read`), against the flat file's bits made float32. Beside them zarr-python and, where it is installed,
TensorStore (both give the stored bits). All with the page cache warm; then store and flat file with their pages
dropped before.

First all readers are shown to give the written numbers, bit for bit; then ways run in turns and medians count. The
disk is synced before each timed write, so that no way pays for what came before. Disk: two stores' bytes; memory:
one shard's slab, twice.

    python benchmarks/bench_store.py --dir /where/stores/will/lie
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import zarr
from numpy.typing import NDArray

from permafrost.extractor.config import ExtractConfig
from permafrost.extractor.durable import sync_folder
from permafrost.extractor.reader import Store, decode_floats
from permafrost.extractor.shards import rows_per_shard
from permafrost.extractor.store import FORMAT, STORED, Layout, complete_metadata, create_metadata
from permafrost.extractor.transfer import TORCH_DTYPES, Slab
from permafrost.extractor.writer import ShardRows, write_shard

if TYPE_CHECKING:  # to mypy this folder is a package, to Python it is the script's own
    from benchmarks import common
else:
    import common

WRITE_TARGET, READ_TARGET = 0.7, 1.5


def arguments() -> argparse.Namespace:
    parser = common.parser(__doc__)
    parser.add_argument("--dir", type=Path, help="where the files are written; else the system's temporary folder")
    parser.add_argument("--shards", type=int, default=4)
    parser.add_argument("--shard-size", default="128MiB", help="as `extract --shard-size`")
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--dtype", choices=tuple(STORED), default="bfloat16")
    parser.add_argument("--codec", choices=("none", "zstd", "blosc"), default="none")
    parser.add_argument("--repeats", type=int, default=7, help="timed passes of each way of reading")
    parser.add_argument("--write-repeats", type=int, default=5, help="timed passes of each way of writing")
    return parser.parse_args()


def make_layout(flags: argparse.Namespace) -> Layout:
    row = flags.layers * flags.width * STORED[flags.dtype].itemsize
    shard_rows = rows_per_shard(row, ExtractConfig(shard_size=flags.shard_size).shard_bytes)
    names = tuple(str(i) for i in range(flags.layers))
    rows = flags.shards * shard_rows
    return Layout(rows, names, flags.width, flags.dtype, shard_rows, flags.codec, ("resid_post",))


def random_slab(layout: Layout) -> tuple[Slab, ShardRows]:
    """A shard's worth of random normal numbers, and what goes with its rows."""
    slab = Slab(layout, TORCH_DTYPES[layout.dtype], layout.blocks, torch.device("cpu"))
    torch.manual_seed(0)
    for block in slab.device[0]:
        block.copy_(torch.randn(block.shape))
    random = np.random.default_rng(0)
    lengths = random.integers(1, 64, layout.shard_rows)
    hashes = random.integers(0, 2**64, layout.shard_rows, np.uint64)
    return slab, ShardRows(lengths, np.zeros(layout.shard_rows, bool), hashes)


def write_store(store: Path, layout: Layout, slab: Slab, rows: ShardRows) -> float:
    """A complete store, every shard of it from the same slab; returns the seconds of the shards."""
    attributes: dict[str, Any] = {"format": FORMAT, "complete": False, "layout": layout.as_dict()}
    create_metadata(store, layout, attributes, [])
    os.sync()
    began = time.perf_counter()
    for shard in layout.shards:
        write_shard(store, layout, shard, rows, slab, {"machine": {}, "parity": {}})
    seconds = time.perf_counter() - began
    complete_metadata(store, attributes | {"complete": True})
    return seconds


def write_plain(folder: Path, files: int, data: memoryview) -> float:
    """As many files of these bytes, each durable; returns seconds."""
    folder.mkdir(parents=True)
    os.sync()
    began = time.perf_counter()
    for number in range(files):
        temp = folder / f"{number}.partial"
        fd = os.open(temp, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        left = data
        while left:  # one call, where the kernel takes it whole
            left = left[os.write(fd, left) :]
        os.fsync(fd)
        os.close(fd)
        temp.replace(folder / str(number))
        sync_folder(folder)
    return time.perf_counter() - began


def shard_bytes(store: Path) -> int:
    """Bytes of all files but the metadata."""
    return sum(p.stat().st_size for p in store.rglob("*") if p.is_file() and p.name != "zarr.json")


def bench_writing(temp: Path, layout: Layout, repeats: int) -> dict[str, Any]:
    """Time both ways of writing; leaves a store at `temp/store.zarr`."""
    slab, rows = random_slab(layout)
    store, plain = temp / "store.zarr", temp / "plain"
    write_store(store, layout, slab, rows)
    total = shard_bytes(store)
    body = slab.array(0).reshape(-1).view(np.uint8)
    data = np.resize(body, total // len(layout.shards)).data  # the same bytes and as many as a shard's files hold

    def fresh(write: Callable[[Path], float], path: Path) -> Callable[[], float]:
        def once() -> float:
            shutil.rmtree(path, ignore_errors=True)
            return write(path)

        return once

    ways = {
        "store": fresh(lambda path: write_store(path, layout, slab, rows), store),
        "plain files": fresh(lambda path: write_plain(path, len(layout.shards), data), plain),
    }
    ways["plain files"]()
    seconds = common.interleaved(ways, repeats)
    shutil.rmtree(plain)
    speeds = {name: common.percentiles([total / s / 1e9 for s in values]) for name, values in seconds.items()}
    ratio = float(np.median(seconds["plain files"]) / np.median(seconds["store"]))
    print(f"writing {len(layout.shards)} shards, {total / 1e6:,.0f} MB, fsynced")
    common.print_table(
        ("", "GB/s", "p10", "p90"),
        [(name, *(f"{speed[key]:.2f}" for key in ("median", "p10", "p90"))) for name, speed in speeds.items()],
    )
    print(f"store to plain files: {ratio:.2f} (wanted: {WRITE_TARGET} or more)\n", flush=True)
    return {
        "bytes": total,
        "gigabytes_per_second": speeds,
        "seconds": {name: common.percentiles(values) for name, values in seconds.items()},
        "ratio": ratio,
        "target": WRITE_TARGET,
        "met": ratio >= WRITE_TARGET,
    }


def open_tensorstore(path: Path) -> Any:
    import tensorstore

    spec = {"driver": "zarr3", "kvstore": {"driver": "file", "path": str(path)}}
    return tensorstore.open(spec, read=True).result()


def timed(read: Callable[[], NDArray[Any]]) -> Callable[[], float]:
    def once() -> float:
        began = time.perf_counter()
        read()
        return time.perf_counter() - began

    return once


def from_disk(read: Callable[[], NDArray[Any]], paths: list[Path]) -> Callable[[], float]:
    """The same with the files' pages dropped from the cache before."""

    def once() -> float:
        for path in paths:
            fd = os.open(path, os.O_RDONLY)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)
        return timed(read)()

    return once


def bench_reading(temp: Path, layout: Layout, repeats: int) -> dict[str, Any]:
    """Time the ways of reading one layer; first all are shown to give the same bits."""
    middle = len(layout.layers) // 2
    store = Store(temp / "store.zarr")
    array = zarr.open_array(store.path / "activations", mode="r")
    flat = temp / "layer.bin"
    stored = STORED[layout.dtype]
    expected = np.asarray(array[:, middle])
    expected.tofile(flat)
    os.sync()
    readers: dict[str, Callable[[], NDArray[Any]]] = {
        "store": lambda: store.read(layers=[middle], stored=True)[:, 0],
        "store, as floats": lambda: store.read(layers=[middle])[:, 0],
        "plain file": lambda: np.fromfile(flat, stored).reshape(-1, layout.width),
        "plain file, as floats": lambda: decode_floats(np.fromfile(flat, stored)).reshape(-1, layout.width),
        "zarr-python": lambda: np.asarray(array[:, middle]),
    }
    if importlib.util.find_spec("tensorstore"):
        tensors = open_tensorstore(store.path / "activations")
        readers["tensorstore"] = lambda: np.asarray(tensors[:, middle].read().result())
    for name, read in readers.items():
        values = read()
        wanted = expected if values.dtype == expected.dtype else decode_floats(expected)
        if values.dtype != wanted.dtype or not np.array_equal(values.view(np.uint8), wanted.view(np.uint8)):
            sys.exit(f"{name} does not give the numbers that were written")
    ways = {name: timed(read) for name, read in readers.items()}
    seconds = common.interleaved(ways, repeats)
    files = [p for p in store.path.rglob("*") if p.is_file()]
    cold = {
        "store, from disk": from_disk(readers["store"], files),
        "plain file, from disk": from_disk(readers["plain file"], [flat]),
    }
    seconds |= common.interleaved(cold, repeats)
    return _report_reading(seconds, expected.nbytes, layout.rows)


def _report_reading(seconds: dict[str, list[float]], size: int, rows: int) -> dict[str, Any]:
    medians = {name: float(np.median(values)) for name, values in seconds.items()}
    base = {name: "plain file, from disk" if "from disk" in name else "plain file" for name in medians}
    times = {name: median / medians[base[name]] for name, median in medians.items()}
    print(f"reading one layer of {rows:,} rows, {size / 1e6:,.1f} MB")
    percentiles = {name: common.percentiles(values) for name, values in seconds.items()}
    common.print_table(
        ("", "ms", "p10", "p90", "GB/s", "× plain file"),
        [
            (
                name,
                *(f"{1e3 * spread[key]:.1f}" for key in ("median", "p10", "p90")),
                f"{size / medians[name] / 1e9:.2f}",
                f"{times[name]:.2f}",
            )
            for name, spread in percentiles.items()
        ],
    )
    floats = medians["store, as floats"] / medians["plain file, as floats"]
    print(f"store to plain file: {times['store']:.2f} times (wanted: {READ_TARGET} or less); ", end="")
    print(f"as floats on both sides {floats:.2f} times", flush=True)
    return {
        "bytes": size,
        "seconds": percentiles,
        "times_plain_file": times,
        "times_as_floats": floats,
        "target": READ_TARGET,
        "met": max(times["store"], floats) <= READ_TARGET,
    }


def main() -> None:
    flags = arguments()
    layout = make_layout(flags)
    with tempfile.TemporaryDirectory(prefix="bench-store-", dir=flags.dir) as temp:
        document = {
            "benchmark": "store",
            **common.environment(gpu=False),
            "sizes": layout.as_dict() | {"layers": len(layout.layers), "shards": len(layout.shards)},
            "folder": str(flags.dir or tempfile.gettempdir()),
            "writing": bench_writing(Path(temp), layout, flags.write_repeats),
            "reading": bench_reading(Path(temp), layout, flags.repeats),
        }
    common.finish(document, flags.out)


if __name__ == "__main__":
    main()

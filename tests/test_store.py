"""The store's format: other readers see the same numbers, damage is seen by all, holes never read as numbers.

Every codec and dtype is written by our own shard writer and read by zarr-python, TensorStore and xarray. A short last
shard and a short last row block are in each layout. A flipped byte must be found whichever chunk it is in.
"""

from __future__ import annotations

import json
import multiprocessing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorstore
import xarray
import zarr
from conftest import write_lines
from numpy.typing import NDArray

from permafrost.extractor.cli import main
from permafrost.extractor.codec import encode_shard, read_index
from permafrost.extractor.config import ExtractConfig
from permafrost.extractor.errors import DamageError, UsageError
from permafrost.extractor.reader import Store, decode_floats
from permafrost.extractor.run import run
from permafrost.extractor.shards import Shard
from permafrost.extractor.store import Layout, shard_path
from permafrost.extractor.verify import verify

ROWS = 700  # shards of 256 rows: two whole ones and one of 188


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    lines = [f"The cat sat on mat {i} and {'ran ' * (i % 7)}." for i in range(ROWS)]
    return write_lines(tmp_path_factory.mktemp("corpus") / "corpus.txt", lines)


def make(corpus: Path, model: Path, out: Path, **settings: Any) -> Store:
    config: dict[str, Any] = {
        "corpus": str(corpus),
        "model": str(model),
        "out": str(out),
        "shard_size": "128KiB",
        "quiet": True,
    }
    run(ExtractConfig(**config | settings))
    return Store(out)


@pytest.fixture(scope="module")
def store(corpus: Path, model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Store:
    return make(corpus, model_folder, tmp_path_factory.mktemp("store") / "s.zarr")


def read_tensorstore(path: Path) -> NDArray[Any]:
    spec = {"driver": "zarr3", "kvstore": {"driver": "file", "path": str(path)}}
    return np.asarray(tensorstore.open(spec, open=True).result()[...].read().result())


@pytest.mark.parametrize("codec", ["none", "zstd", "blosc"])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_zarr_tensorstore_and_xarray_read_what_we_read(
    codec: str, dtype: str, corpus: Path, model_folder: Path, tmp_path: Path
) -> None:
    ours = make(corpus, model_folder, tmp_path / "s.zarr", codec=codec, dtype=dtype)
    numbers = ours.read()
    assert numbers.shape == (ROWS, 4, 32)
    assert np.isfinite(numbers).all()
    group = zarr.open_group(tmp_path / "s.zarr", mode="r")
    np.testing.assert_array_equal(decode_floats(np.asarray(group.get("activations"))), numbers)
    np.testing.assert_array_equal(decode_floats(read_tensorstore(tmp_path / "s.zarr" / "activations")), numbers)
    data = xarray.open_zarr(tmp_path / "s.zarr", consolidated=True)
    assert data["activations"].dims == ("row", "layer", "width")
    np.testing.assert_array_equal(decode_floats(data["activations"].values), numbers)
    for name in ("length", "truncated", "text_hash"):
        np.testing.assert_array_equal(data[name].values, ours.read_rows(name))
        np.testing.assert_array_equal(read_tensorstore(tmp_path / "s.zarr" / name), ours.read_rows(name))
    assert main(["verify", str(tmp_path / "s.zarr")]) == 0


def test_listing_the_group_shows_the_arrays_and_does_not_stumble_over_the_tables(store: Store) -> None:
    group = zarr.open_group(store.path, mode="r")
    assert sorted(group.array_keys()) == ["activations", "length", "text_hash", "truncated"]


def test_several_sites_are_an_array_each(corpus: Path, model_folder: Path, tmp_path: Path) -> None:
    sites = ("resid_post", "attn_out", "mlp_out")
    several = make(corpus, model_folder, tmp_path / "s.zarr", site=sites)
    assert several.layout.arrays == sites
    for site in sites:
        alone = make(corpus, model_folder, tmp_path / f"{site}.zarr", site=(site,))
        np.testing.assert_array_equal(several.read(site=site), alone.read())
        assert zarr.open_array(tmp_path / f"{site}.zarr" / "activations", mode="r").attrs["site"] == site
    assert main(["verify", str(tmp_path / "s.zarr")]) == 0


def test_part_of_a_store_reads_as_that_part(store: Store) -> None:
    everything = store.read()
    for start, stop, layers in ((0, 1, ["0"]), (255, 257, [3, 1]), (250, 700, ["2"]), (699, 700, None), (5, 5, None)):
        picked = [0, 1, 2, 3] if layers is None else [int(layer) for layer in layers]
        np.testing.assert_array_equal(store.read(start, stop, layers), everything[start:stop, picked])


def test_the_stored_dtype_reads_as_the_bits_of_the_floats(corpus: Path, model_folder: Path, tmp_path: Path) -> None:
    bits = make(corpus, model_folder, tmp_path / "s.zarr", dtype="bfloat16")
    for layers in ([2], [3, 0], None):
        stored = bits.read(10, 650, layers, stored=True)
        assert stored.dtype == np.uint16
        np.testing.assert_array_equal(decode_floats(stored), bits.read(10, 650, layers))


def test_a_forked_process_reads_too(store: Store) -> None:
    expected = store.read(layers=["1"])  # starts the reading threads, which a child does not inherit
    with multiprocessing.get_context("fork").Pool(1) as pool:
        np.testing.assert_array_equal(pool.apply(store.read, (0, None, ["1"])), expected)


def test_what_is_not_there_is_an_error(store: Store) -> None:
    asked: list[dict[str, Any]] = [{"layers": ["final"]}, {"stop": 701}, {"site": "mlp_out"}]
    for options in asked:
        with pytest.raises(UsageError, match="store"):
            store.read(**options)


def copy_of(store: Store, to: Path) -> Path:
    import shutil

    shutil.copytree(store.path, to)
    return to


@pytest.mark.parametrize("shard", [0, 2])
@pytest.mark.parametrize("where", [0.0, 0.37, 0.93, 0.999])
def test_a_flipped_byte_is_found_by_every_reader(store: Store, shard: int, where: float, tmp_path: Path) -> None:
    path = copy_of(store, tmp_path / "s.zarr")
    file = path / "activations" / "c" / str(shard) / "0" / "0"
    data = bytearray(file.read_bytes())
    at = int(where * (len(data) - 1))
    data[at] ^= 0x01
    file.write_bytes(data)

    verdict = verify(path)
    assert len(verdict.problems) == 1
    first, last = (0, 255) if shard == 0 else (512, 699)
    assert f"rows {first}–{last}" in verdict.problems[0]
    with pytest.raises(DamageError, match=f"rows {first}–{last}"):
        Store(path).read(first, last + 1)
    with pytest.raises(ValueError, match=r"(?i)checksum|crc32c"):
        zarr.open_array(path / "activations", mode="r")[:]
    with pytest.raises(ValueError, match="DATA_LOSS"):
        read_tensorstore(path / "activations")


@pytest.mark.parametrize("name", ["length/c/1", "truncated/c/0", "text_hash/c/2", "sentences.parquet", "shards/1.json"])
def test_damage_beside_the_activations_is_found(store: Store, name: str, tmp_path: Path) -> None:
    path = copy_of(store, tmp_path / "s.zarr")
    data = bytearray((path / name).read_bytes())
    data[len(data) // 3] ^= 0xFF
    (path / name).write_bytes(data)
    assert verify(path).problems


@pytest.mark.parametrize(
    "name", ["activations/c/1/0/0", "length/c/1", "lines.parquet", "sentences.parquet", "shards/0.json"]
)
def test_a_missing_file_is_found(store: Store, name: str, tmp_path: Path) -> None:
    path = copy_of(store, tmp_path / "s.zarr")
    (path / name).unlink()
    assert verify(path).problems
    assert main(["verify", str(path)]) == 4


def test_a_swapped_text_is_found(store: Store, tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    path = copy_of(store, tmp_path / "s.zarr")
    table = pq.read_table(path / "sentences.parquet")
    texts = table.column("text").to_pylist()
    texts[600], texts[601] = texts[601], texts[600]
    pq.write_table(
        pa.table({"text": pa.array(texts, pa.large_string())}), path / "sentences.parquet", row_group_size=256
    )
    assert verify(path).problems == ["sentences.parquet, rows 512–699: not the text that was extracted"]


def test_rows_that_are_missing_read_as_nan_elsewhere_and_raise_here(store: Store, tmp_path: Path) -> None:
    path = copy_of(store, tmp_path / "s.zarr")
    (path / "activations" / "c" / "1" / "0" / "0").unlink()
    elsewhere = np.asarray(zarr.open_array(path / "activations", mode="r")[:])
    assert np.isnan(elsewhere[256:512]).all()
    assert np.isfinite(elsewhere[:256]).all()
    with pytest.raises(DamageError, match="rows 256–511"):
        Store(path).read()
    np.testing.assert_array_equal(Store(path).read(0, 256), store.read(0, 256))


def test_all_zero_chunks_are_written(tmp_path: Path) -> None:
    layout = Layout(300, ("0",), 4, "float32", 256, "none", ("resid_post",))
    shard = Shard(1, 256, 300)
    slab = np.zeros((1, 1, 256, 4), np.float32)
    path = tmp_path / "shard"
    path.write_bytes(b"".join(bytes(b) for b in encode_shard(slab, layout, shard)))
    assert read_index(path, layout, shard)[0, 0].tolist() == [0, 256 * 16 + 4]


def test_a_shard_cut_short_or_grown_is_not_taken_for_whole(store: Store, tmp_path: Path) -> None:
    path = copy_of(store, tmp_path / "s.zarr")
    shard = store.layout.shards[0]
    file = shard_path(path, "activations", shard)
    whole = file.read_bytes()
    for data in (whole[:-1], whole[1:], whole[: len(whole) // 2], b"", b"\0" + whole, whole[:100] + whole[104:]):
        file.write_bytes(data)
        with pytest.raises(DamageError, match="rows 0–255"):
            read_index(file, store.layout, shard)


def test_the_provenance_says_where_it_came_from(store: Store) -> None:
    attributes = json.loads((store.path / "zarr.json").read_text())["attributes"]["permafrost"]
    assert attributes["complete"] is True
    assert attributes["format"] == 1
    assert attributes["meaning"]["max_tokens"] == 128
    assert attributes["names"]["model"].endswith("tiny-gpt2")
    assert attributes["parity"]["error"] <= 1e-5
    assert attributes["machines"][0]["shards"] == "0-2"
    assert attributes["counts"]["lines"] == ROWS
    assert {"torch", "transformers", "zarr", "permafrost"} <= attributes["versions"].keys()

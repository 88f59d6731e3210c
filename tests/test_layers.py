"""`--layers` as tables: names, numbers from either end, ranges, mixtures in any order; models of 1, 4 and 12 blocks;
and everything that is refused, with what the model has."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from permafrost.extractor.errors import UsageError
from permafrost.extractor.layers import last_block, parse_layers


@pytest.mark.parametrize(
    ("spec", "blocks", "layers"),
    [
        ("all", 4, "0 1 2 3"),
        ("all", 1, "0"),
        ("0", 4, "0"),
        ("-1", 4, "3"),
        ("-4", 4, "0"),
        ("0,2", 4, "0 2"),
        ("2,0,2", 4, "0 2"),
        (" 1 , 3 ", 4, "1 3"),
        ("0,5,10-11", 12, "0 5 10 11"),
        ("1-3", 4, "1 2 3"),
        ("2-2", 4, "2"),
        ("-3--1", 4, "1 2 3"),
        ("1--1", 4, "1 2 3"),
        ("-4-1", 4, "0 1"),
        ("3,-1", 4, "3"),
        ("embed", 4, "embed"),
        ("final", 4, "final"),
        ("-1,embed", 4, "embed 3"),
        ("final,0,embed", 4, "embed 0 final"),
        ("all,embed,final", 2, "embed 0 1 final"),
        ("all,1", 2, "0 1"),
    ],
)
def test_layers_come_once_each_in_the_order_the_model_runs_them(spec: str, blocks: int, layers: str) -> None:
    assert parse_layers(spec, blocks) == tuple(layers.split())


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("4", "no block 4; the model has blocks 0 to 3"),
        ("-5", "no block -5; the model has blocks 0 to 3"),
        ("0,99", "no block 99"),
        ("2-4", "no block 4"),
        ("3-1", "3-1 runs backwards"),
        ("-1-0", "-1-0 runs backwards"),
        ("", "'' is none of"),
        ("0,,1", "'' is none of"),
        ("0,", "'' is none of"),
        ("last", "'last' is none of all, a number, a range as 3-7, embed, final"),
        ("All", "'All' is none of"),
        ("1.5", "'1.5' is none of"),
        ("1:3", "'1:3' is none of"),
        ("1-2-3", "'1-2-3' is none of"),
    ],
)
def test_layers_that_are_not_there_or_make_no_sense_are_refused(spec: str, says: str) -> None:
    with pytest.raises(UsageError) as error:
        parse_layers(spec, 4)
    assert says in str(error.value) and f"--layers {spec}" in str(error.value)


@pytest.mark.parametrize(
    ("layers", "last"),
    [
        (("embed",), -1),
        (("0",), 0),
        (("embed", "2"), 2),
        (("0", "5", "10"), 10),
        (("final",), 11),
        (("embed", "final"), 11),
        (("0", "final"), 11),
        (("9", "11"), 11),
    ],
)
def test_the_last_block_that_must_run(layers: tuple[str, ...], last: int) -> None:
    assert last_block(layers, 12) == last


@settings(deadline=None)
@given(blocks=st.integers(1, 60), data=st.data())
def test_numbers_from_the_end_name_the_same_blocks(blocks: int, data: st.DataObject) -> None:
    chosen = data.draw(st.sets(st.integers(0, blocks - 1), min_size=1))
    forward = parse_layers(",".join(map(str, chosen)), blocks)
    assert forward == parse_layers(",".join(str(n - blocks) for n in chosen), blocks)
    assert forward == tuple(map(str, sorted(chosen)))
    assert last_block(forward, blocks) == max(chosen)

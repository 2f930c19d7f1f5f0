"""What devices can do at best, from their vendors' data sheets."""

from __future__ import annotations

from dataclasses import dataclass

_GB = 2**30
"""Data sheets say GB; drivers report up to 2 % less than as many GiB."""


@dataclass(frozen=True)
class DeviceFigures:
    """One device: the peak of dense bf16 matrix products in operations per second, the memory in
    bytes, and its bandwidth in bytes per second.

    `node_link` and `network_link` are the bytes per second that it can send to others of its node
    and beyond.
    """

    bf16_flops: float
    memory_bytes: int
    memory_bandwidth: float
    node_link: float
    network_link: float
    engine_bytes: int = 0
    """Memory that an inference engine beside the policy keeps."""

    def link(self, ranks: int) -> float:
        """The bytes per second at which a group that spans so many consecutive ranks sends."""
        return self.node_link if ranks <= NODE else self.network_link


NODE = 8
"""Devices of a node, between which links are fast."""

_A100_SXM = DeviceFigures(312e12, 80 * _GB, 2.039e12, 300e9, 25e9)
_A100_PCIE = DeviceFigures(312e12, 80 * _GB, 1.935e12, 32e9, 25e9)
_A100_SXM_40 = DeviceFigures(312e12, 40 * _GB, 1.555e12, 300e9, 25e9)
_A100_PCIE_40 = DeviceFigures(312e12, 40 * _GB, 1.555e12, 32e9, 25e9)
_H100_PCIE = DeviceFigures(756.5e12, 80 * _GB, 2e12, 64e9, 50e9)
_H100_SXM = DeviceFigures(989.4e12, 80 * _GB, 3.35e12, 450e9, 50e9)
_H200_SXM = DeviceFigures(989.4e12, 141 * _GB, 4.8e12, 450e9, 50e9)
_B200 = DeviceFigures(2250e12, 180 * _GB, 8e12, 900e9, 50e9)

SHORT: dict[str, DeviceFigures] = {
    "A100": _A100_SXM,
    "H100": _H100_SXM,
    "H200": _H200_SXM,
    "B200": _B200,
}
"""The same under the names by which people ask for them, all on boards with NVLink."""

DEVICES: dict[str, DeviceFigures] = {
    "NVIDIA A100-SXM4-80GB": _A100_SXM,
    "NVIDIA A100 80GB PCIe": _A100_PCIE,
    "NVIDIA A100-SXM4-40GB": _A100_SXM_40,
    "NVIDIA A100-PCIE-40GB": _A100_PCIE_40,
    "NVIDIA H100 80GB HBM3": _H100_SXM,
    "NVIDIA H100 PCIe": _H100_PCIE,
    "NVIDIA H200": _H200_SXM,
    "NVIDIA B200": _B200,
}
"""Figures by the name that the driver, and so torch, gives the device.

Operations are without sparsity: half of what NVIDIA's sheets print beside a footnote about it.
Sources: NVIDIA's data sheets "A100 40GB" (2020), "A100 80GB" (2021), "H100" (2023), "H200" (2024)
and "DGX B200" (2024), whose figures are of eight devices. Links: half of NVLink's total, which
counts both directions (PCIe 4 or 5 for the PCIe boards), and one network port for each device as in
NVIDIA's DGX nodes, 200 Gb/s with A100 and 400 Gb/s with the others.
"""


def figures_of(name: str) -> DeviceFigures | None:
    """The figures of the device that torch calls `name`; None if they are not known here."""
    return DEVICES.get(name.strip())

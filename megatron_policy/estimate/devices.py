"""What devices can do at best, from their vendors' data sheets."""

from __future__ import annotations

from dataclasses import dataclass

_GB = 2**30
"""Data sheets say GB; drivers report up to 1 % less than as many GiB."""


@dataclass(frozen=True)
class DeviceFigures:
    """One device: the peak of dense bf16 matrix products in operations per second, the memory in
    bytes, and its bandwidth in bytes per second.
    """

    bf16_flops: float
    memory_bytes: int
    memory_bandwidth: float


_A100_SXM = DeviceFigures(312e12, 80 * _GB, 2.039e12)
_A100_PCIE = DeviceFigures(312e12, 80 * _GB, 1.935e12)
_H100_SXM = DeviceFigures(989.4e12, 80 * _GB, 3.35e12)
_H200_SXM = DeviceFigures(989.4e12, 141 * _GB, 4.8e12)
_B200 = DeviceFigures(2250e12, 180 * _GB, 8e12)

DEVICES: dict[str, DeviceFigures] = {
    "NVIDIA A100-SXM4-80GB": _A100_SXM,
    "NVIDIA A100 80GB PCIe": _A100_PCIE,
    "NVIDIA H100 80GB HBM3": _H100_SXM,
    "NVIDIA H200": _H200_SXM,
    "NVIDIA B200": _B200,
}
"""Figures by the name that the driver, and so torch, gives the device.

Operations are without sparsity: half of what NVIDIA's sheets print beside a footnote about it.
Sources: NVIDIA's data sheets "A100 80GB" (2021), "H100" (2023), "H200" (2024) and "DGX B200"
(2024), whose figures are of eight devices.
"""


def figures_of(name: str) -> DeviceFigures | None:
    """The figures of the device that torch calls `name`; None if they are not known here."""
    return DEVICES.get(name.strip())

"""Optional packages: what needs each, and how to install it."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from types import ModuleType

from megatron_policy.errors import MissingPackageError


@dataclass(frozen=True)
class Extra:
    """An extra of pyproject.toml that brings one package; `needed_by` completes an error text."""

    name: str
    requirement: str
    needed_by: str


EXTRAS = {
    "ray": Extra("ray", "ray>=2.40", "Policy, RayVirtualCluster, init_ray and workers run on Ray"),
    "fla": Extra(
        "fla", "fla-core>=0.6", "policy.megatron_cfg.recurrence_impl 'fla' takes its kernels"
    ),
    "matplotlib": Extra("pictures", "matplotlib>=3.8", "pictures are drawn by matplotlib"),
    "nixl": Extra("nixl", "nixl>=1.5", 'the mover "nixl" writes with NIXL'),
    "s3fs": Extra("s3", "s3fs>=2024.6", "s3fs reads and writes s3:// URLs"),
    "tensorboard": Extra(
        "tensorboard",
        "tensorboard>=2.16",
        "TensorBoardWriter and metrics.tensorboard use TensorBoard",
    ),
    "wandb": Extra("wandb", "wandb>=0.18", "WandbWriter and metrics.wandb use wandb"),
    "zmq": Extra("refit", "pyzmq>=26", "refits through shared memory use ZeroMQ"),
}
"""By the name under which the package is imported."""


def require(package: str) -> ModuleType:
    """Import a package of `EXTRAS`; MissingPackageError, with the pip command, if it is missing."""
    try:
        return importlib.import_module(package)
    except ModuleNotFoundError as error:
        if error.name != package:
            raise  # it is installed, and lacks a package of its own
        extra = EXTRAS[package]
        raise MissingPackageError(
            f"{extra.needed_by}, which is not installed. Install it: "
            f'pip install "{extra.requirement}", or, in a checkout of megatron-policy, '
            f'pip install ".[{extra.name}]"',
            name=package,
        ) from None

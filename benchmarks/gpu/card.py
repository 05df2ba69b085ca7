"""Which card this is."""

from __future__ import annotations

import subprocess

import torch


def name() -> str:
    """As its driver calls it, such as NVIDIA H200."""
    return str(torch.cuda.get_device_properties(0).name)


def folder(card: str) -> str:
    """What results of a card lie under: h200 of NVIDIA H200."""
    return card.lower().removeprefix("nvidia ").replace(" ", "-")


def driver() -> str:
    """The driver's version, as nvidia-smi says it."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return done.stdout.split()[0]

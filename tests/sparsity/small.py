"""Small checkpoints, text to show them, and the command in this process."""

import json

import numpy as np
import torch

from steelyard import cli, model
from steelyard.checkpoint.formats import load_into, open_source
from steelyard.model.modules import Linear
from tests.checkpoint.models import SHAPES, Held, written
from tests.conftest import write_documents

__all__ = ["SHAPES", "Held", "written"]
SAMPLES, LENGTH = 6, 24


def write_text(path) -> str:
    """Token files with what any of the small models can read."""
    random = np.random.RandomState(0)
    write_documents(path / "tokens", [random.randint(0, 100, 90) for _ in range(20)], 100)
    return str(path / "tokens")


def answer(capsys, *words):
    """The exit code, the JSON that a command printed, and what it said beside."""
    code = None
    try:
        cli.main([str(word) for word in (*words, "--json")])
    except SystemExit as exit_:
        code = exit_.code
    out, err = capsys.readouterr()
    return code, json.loads(out) if out.strip() else None, err


def loaded(path):
    """A whole model of ours with a checkpoint's weights."""
    source = open_source(path)
    network = model.build(source.config)
    load_into(source, network)
    return network.eval()


def linears(layer: torch.nn.Module):
    return {name: module for name, module in layer.named_modules() if isinstance(module, Linear)}


@torch.no_grad()
def inputs_of(network, number: int, tokens):
    """What flows into each product of a layer when the whole model reads the tokens."""
    seen: dict[str, list[torch.Tensor]] = {}
    handles = [
        module.register_forward_hook(lambda _, inputs, __, name=name: seen.setdefault(name, []).append(inputs[0]))
        for name, module in linears(network.layers[str(number)]).items()
    ]
    for row in tokens:
        network(row[None])
    for handle in handles:
        handle.remove()
    return {name: torch.cat([x.flatten(0, -2) for x in rows]) for name, rows in seen.items()}

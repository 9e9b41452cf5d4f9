"""Save and load checkpoints with torch.distributed.checkpoint. A checkpoint folder is written atomically.

Modules that need torch are imported on first use, because the hub code in this package does not need torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from steelyard.checkpoint.async_save import Saver
    from steelyard.checkpoint.folder import STATE, Checkpoint, latest, load, save, source
    from steelyard.checkpoint.sharded_tensor import TensorShard
    from steelyard.checkpoint.step_folders import VALID_LOSS, best

_MODULES = {
    "folder": ("STATE", "Checkpoint", "latest", "load", "save", "source"),
    "step_folders": ("VALID_LOSS", "best"),
    "sharded_tensor": ("TensorShard",),
    "async_save": ("Saver",),
}

__all__ = ["STATE", "VALID_LOSS", "Checkpoint", "Saver", "TensorShard", "best", "latest", "load", "save", "source"]


def __getattr__(name: str) -> Any:
    for module, names in _MODULES.items():
        if name in names:
            return getattr(import_module(f"{__name__}.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

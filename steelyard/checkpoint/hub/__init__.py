"""The hub: who we are there, fetching a model, sending one. All of it through `huggingface_hub`.

`HF_ENDPOINT`, `HF_TOKEN`, `HF_HOME` and `HF_HUB_OFFLINE` mean what they mean to that library. Nothing that is raised or
printed holds a token.
"""

from steelyard.checkpoint.hub.contents import fetch, is_name, model_files
from steelyard.checkpoint.hub.pull import pull
from steelyard.checkpoint.hub.send import send
from steelyard.checkpoint.hub.session import login, read_token, talking, token, whoami

__all__ = [
    "fetch",
    "is_name",
    "login",
    "model_files",
    "pull",
    "read_token",
    "send",
    "talking",
    "token",
    "whoami",
]

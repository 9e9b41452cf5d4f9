"""The hub: who we are there, fetching a model, sending one. All of it through `huggingface_hub`.

`HF_ENDPOINT`, `HF_TOKEN`, `HF_HOME` and `HF_HUB_OFFLINE` mean what they mean to that library. Nothing that is raised or
printed holds a token.
"""

from steelyard.checkpoint.hub.pull import pull
from steelyard.checkpoint.hub.push import push
from steelyard.checkpoint.hub.repo_files import fetch, is_name, model_files
from steelyard.checkpoint.hub.session import login, read_token, talking, token, whoami

__all__ = [
    "fetch",
    "is_name",
    "login",
    "model_files",
    "pull",
    "push",
    "read_token",
    "talking",
    "token",
    "whoami",
]

"""The Hugging Face Hub: log in, download and upload models, through `huggingface_hub`.

`HF_ENDPOINT`, `HF_TOKEN`, `HF_HOME` and `HF_HUB_OFFLINE` work as in that library. Errors and output never contain a
token.
"""

from steelyard.checkpoint.hub.pull import pull
from steelyard.checkpoint.hub.push import push
from steelyard.checkpoint.hub.repo_files import fetch, is_name, model_files
from steelyard.checkpoint.hub.session import hub_errors, login, read_token, token, whoami

__all__ = [
    "fetch",
    "hub_errors",
    "is_name",
    "login",
    "model_files",
    "pull",
    "push",
    "read_token",
    "token",
    "whoami",
]

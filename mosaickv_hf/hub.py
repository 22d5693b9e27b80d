"""Configs as files, in a folder or in a repository on the Hugging Face Hub."""

import os
from pathlib import Path

from huggingface_hub import HfApi, hf_hub_download
from huggingface_hub.errors import EntryNotFoundError, HFValidationError, RepositoryNotFoundError

CONFIG_FILE = "mosaickv_config.json"


def write_config(text: str, folder: str | os.PathLike) -> None:
    """Writes a config's JSON into a folder, which is made if it is not there."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    temporary = folder / f"{CONFIG_FILE}.{os.getpid()}.tmp"
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(folder / CONFIG_FILE)


def read_config(name_or_path: str | os.PathLike, **download) -> str:
    """A config's JSON from a folder or a Hub repository.

    Args:
        name_or_path: a folder, or a repository such as `"user/name"`.
        download: arguments of `hf_hub_download`: `revision`, `token`, `cache_dir`, `local_files_only` and others.

    Raises:
        OSError: there is no such folder or repository, or no config in it.
    """
    path = Path(name_or_path) / CONFIG_FILE
    if not Path(name_or_path).is_dir():
        try:
            path = Path(hf_hub_download(str(name_or_path), CONFIG_FILE, **download))
        except (HFValidationError, RepositoryNotFoundError, EntryNotFoundError) as error:
            raise OSError(f"{name_or_path} is no folder, nor a repository with a {CONFIG_FILE}: {error}") from error
    if not path.is_file():
        raise OSError(f"{name_or_path} holds no {CONFIG_FILE}")
    return path.read_text(encoding="utf-8")


def push_config(text: str, repo_id: str, *, private: bool | None, token: str | bool | None, message: str) -> str:
    """Uploads a config's JSON to a Hub repository, which is made if it is not there; returns the commit's address."""
    api = HfApi(token=token)
    repo_id = api.create_repo(repo_id, private=private, exist_ok=True).repo_id
    commit = api.upload_file(
        path_or_fileobj=text.encode(), path_in_repo=CONFIG_FILE, repo_id=repo_id, commit_message=message
    )
    return commit.commit_url

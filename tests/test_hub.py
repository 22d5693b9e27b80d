"""Configs on the Hub, and the repository that makes `generate` use the cache. Nothing here touches a network."""

import types

import pytest
import torch
from conftest import tiny_model
from export_custom_generate import export
from huggingface_hub import ModelCard

from mosaickv_hf import MosaicKVCache, MosaicKVConfig, hub

CONFIG = MosaicKVConfig(token_ratio=0.25, min_length=16, min_segment_length=48, recent_window=9, buffer_tokens=16)


def test_a_config_in_a_folder(tmp_path):
    CONFIG.save_pretrained(tmp_path / "new")
    assert MosaicKVConfig.from_pretrained(tmp_path / "new") == CONFIG
    with pytest.raises(OSError, match=r"holds no mosaickv_config\.json"):
        MosaicKVConfig.from_pretrained(tmp_path)
    (tmp_path / hub.CONFIG_FILE).write_text('{"key_bits": 5}')
    with pytest.raises(ValueError, match="key_bits"):
        MosaicKVConfig.from_pretrained(tmp_path)


def test_what_is_no_repository(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(OSError, match="no folder"):
        MosaicKVConfig.from_pretrained("not/a/repository")


def test_a_config_in_a_repository(tmp_path, monkeypatch):
    """What is uploaded is what is downloaded; the Hub itself is a folder here."""

    class Api:
        def __init__(self, token):
            assert token == "t"

        def create_repo(self, repo_id, private, exist_ok):
            assert exist_ok and private
            return types.SimpleNamespace(repo_id=f"me/{repo_id}")

        def upload_file(self, path_or_fileobj, path_in_repo, repo_id, commit_message):
            assert repo_id == "me/cache"
            (tmp_path / path_in_repo).write_bytes(path_or_fileobj)
            return types.SimpleNamespace(commit_url="address")

    def download(repo_id, name, revision):
        assert (repo_id, revision) == ("me/cache", "v1")
        return str(tmp_path / name)

    monkeypatch.setattr(hub, "HfApi", Api)
    monkeypatch.setattr(hub, "hf_hub_download", download)
    assert CONFIG.push_to_hub("cache", private=True, token="t") == "address"
    assert MosaicKVConfig.from_pretrained("me/cache", revision="v1") == CONFIG


@pytest.fixture(scope="module")
def llama():
    return tiny_model("llama-group1")


def test_custom_generate(tmp_path, llama):
    export(tmp_path, "user/mosaic")
    inputs = torch.randint(3, 256, (1, 100), generator=torch.Generator().manual_seed(0))
    given = dict(inputs=inputs, max_new_tokens=20, do_sample=False, return_dict_in_generate=True)
    through = dict(custom_generate=str(tmp_path), trust_remote_code=True)
    plain = llama.generate(**given)

    lossless = llama.generate(**given, **through, compression="lossless")
    assert torch.equal(lossless.sequences, plain.sequences)
    small = llama.generate(**given, **through, compression=CONFIG.to_dict())
    cache = small.get("cache", small.get("past_key_values"))
    assert isinstance(cache, MosaicKVCache) and cache.compression == CONFIG
    assert cache.stats().segments > 0

    own = MosaicKVCache(CONFIG)
    again = llama.generate(**given, **through, past_key_values=own)
    assert torch.equal(again.sequences, small.sequences) and own.get_seq_length() == 119


def test_the_exported_card(tmp_path):
    export(tmp_path, "user/mosaic")
    card = ModelCard.load(tmp_path / "README.md")
    metadata = card.data.to_dict()
    assert "custom_generate" in metadata["tags"] and metadata["library_name"] == "transformers"
    assert 'custom_generate="user/mosaic"' in card.text
    assert (tmp_path / "custom_generate" / "requirements.txt").read_text() == "mosaickv-hf\n"

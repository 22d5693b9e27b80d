"""The examples run, on a small random model."""

import runpy
import sys
from pathlib import Path

import nbformat
import pytest
from conftest import tiny_model
from nbclient import NotebookClient

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def folder(byte_tokenizer, tmp_path_factory):
    model = tiny_model("llama-group1", vocab_size=257, eos_token_id=256, pad_token_id=256)
    path = tmp_path_factory.mktemp("model")
    model.save_pretrained(path)
    byte_tokenizer.save_pretrained(path)
    return path


def chat(monkeypatch, capsys, *given):
    monkeypatch.setattr(sys, "argv", ["chat_with_document.py", *map(str, given)])
    runpy.run_path(str(ROOT / "examples" / "chat_with_document.py"), run_name="__main__")
    return capsys.readouterr().out


def test_a_document_is_read_once(folder, tmp_path, monkeypatch, capsys):
    text = tmp_path / "text.txt"
    text.write_text("Call me Ishmael. Some years ago, never mind how long precisely, " * 20)
    given = ("--model", folder, "--text", text, "--cache", tmp_path / "cache", "--tokens", 900, "--max-new-tokens", 12)
    first, second = chat(monkeypatch, capsys, *given), chat(monkeypatch, capsys, *given)
    assert first.startswith("Read 9") and second.startswith("Loaded 9")
    answers = [[line for line in out.splitlines() if line.startswith(("Q:", "A:"))] for out in (first, second)]
    assert answers[0] == answers[1] and len(answers[0]) == 4
    with pytest.raises(ValueError, match="`input_ids`"):
        chat(monkeypatch, capsys, *given, "--tokens", 800)


@pytest.mark.slow
def test_the_notebook_runs(folder, monkeypatch):
    monkeypatch.setenv("MODEL", str(folder))
    monkeypatch.setenv("TOKENS", "120")
    notebook = nbformat.read(ROOT / "examples" / "tour.ipynb", as_version=4)
    NotebookClient(notebook, timeout=300, resources={"metadata": {"path": ROOT / "examples"}}).execute()
    printed = "".join(o.get("text", "") for cell in notebook.cells for o in cell.get("outputs", []))
    assert "budget 0.20: " in printed and "materializations" in printed
    pictures = [o for cell in notebook.cells for o in cell.get("outputs", []) if "image/png" in o.get("data", {})]
    assert len(pictures) == 2

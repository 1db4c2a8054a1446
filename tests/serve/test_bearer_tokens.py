"""Which tokens are accepted: hashes of the environment and of a file that changes."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.config import BadInput
from serve.http.bearer_tokens import FILE, HASHES, BearerTokens

from .conftest import hash_of


def accepted(tokens: BearerTokens, *candidates: str) -> list[str]:
    return [token for token in candidates if tokens.sender(f"Bearer {token}")]


@pytest.fixture
def file(tmp_path, monkeypatch) -> Path:
    """A file that accepts the token a."""
    path = tmp_path / "tokens"
    path.write_text(f"{hash_of('a')}\n")
    monkeypatch.setenv(FILE, str(path))
    return path


def replace(file: Path, text: str) -> None:
    """As an editor or Kubernetes does it: another file takes the place."""
    new = file.with_name("new")
    new.write_text(text)
    new.replace(file)


def test_hashes_come_from_the_environment_and_from_a_file(file, monkeypatch):
    monkeypatch.setenv(HASHES, f" {hash_of('b').upper()} , {hash_of('c')}")
    assert accepted(BearerTokens.of_environment(), "a", "b", "c", "d") == ["a", "b", "c"]
    monkeypatch.delenv(FILE)
    assert accepted(BearerTokens.of_environment(), "a", "b", "c", "d") == ["b", "c"]
    monkeypatch.setenv(HASHES, "")
    assert BearerTokens.of_environment().sender("") == ""


def test_a_token_may_have_a_name(file, monkeypatch):
    monkeypatch.setenv(HASHES, f"search-team={hash_of('b')}")
    replace(file, f"{hash_of('a')}\nnight.job={hash_of('c')}\n")
    tokens = BearerTokens.of_environment()
    senders = [tokens.sender(f"Bearer {token}") for token in "abcd"]
    assert senders == [hash_of("a")[:16], "search-team", "night.job", None]
    for entry in (f"a b={hash_of('a')}", f"é={hash_of('a')}", f"{'n' * 41}={hash_of('a')}"):
        with pytest.raises(BadInput, match="NAME=HASH"):
            BearerTokens([entry])


def test_a_file_that_changes_is_read_again(file):
    tokens = BearerTokens.of_environment()
    assert accepted(tokens, "a", "b", "c") == ["a"]
    replace(file, f"{hash_of('b')}\n{hash_of('c')}\n")
    assert accepted(tokens, "a", "b", "c") == ["b", "c"]


@pytest.mark.parametrize("text", ["", "open sesame", None])
def test_a_file_that_becomes_wrong_opens_nothing_and_is_logged_once(file, caplog, text):
    tokens = BearerTokens.of_environment()
    file.unlink() if text is None else replace(file, text)
    for _ in range(2):
        assert tokens.sender("") is None
        assert accepted(tokens, "a", "b") == ["a"]
    (line,) = caplog.messages
    assert FILE in line and "sesame" not in line
    replace(file, hash_of("b"))
    assert accepted(tokens, "a", "b") == ["b"]


@pytest.mark.parametrize("text", ["", "open sesame", None])
def test_a_wrong_file_is_refused_at_the_start(file, text):
    file.unlink() if text is None else file.write_text(text)
    with pytest.raises(BadInput, match=FILE):
        BearerTokens.of_environment()

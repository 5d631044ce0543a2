"""Texts for people: what may not reach a terminal, and what is too long."""

from __future__ import annotations

import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raylaunch.core.text import capped, duration, host_list, printable, text_of
from tests.core.adversarial import steep
from tests.profiles import examples

ANY_TEXT = st.text(st.characters(exclude_categories=()), max_size=300)
"""Any code points, also surrogates."""


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("café 日本 \t ok", "café 日本 \t ok"),
        ("a\x1b[2Jb\x07\rc", r"a\x1b[2Jb\x07\rc"),
        ("caf\udce9", r"caf\xe9"),
        ("\ud83d", r"\ud83d"),
        ("a\x9b31m\x7f\x00", r"a\x9b31m\x7f\x00"),
        ("evil\u202etxt.exe\u2066", r"evil\u202etxt.exe\u2066"),
        ("a\u2028b\x85c", r"a\u2028b\x85c"),
    ],
)
def test_what_is_escaped(text, shown):
    """Control characters, what changes the direction of text, and surrogates. Other characters are shown as they are."""
    assert printable(text) == shown


def test_newlines():
    """They are kept where a text may have several lines."""
    assert printable("a\nb") == r"a\nb"
    assert printable("a\nb\r", several_lines=True) == "a\nb\\r"


@examples(200)
@given(ANY_TEXT)
def test_a_printable_text_is_one_line_that_can_be_encoded(text):
    """Of whatever it is made, and it stays as it is when it is made printable again."""
    shown = printable(text)
    assert shown.encode().decode() == shown
    assert len(shown.splitlines()) <= 1
    assert not any(unicodedata.category(one) in ("Cc", "Cs") for one in shown if one != "\t")
    assert printable(shown) == shown


@examples(200)
@given(ANY_TEXT, st.integers(0, 100))
def test_a_capped_text_is_short_and_has_both_ends(text, most):
    """It is no longer than its limit and the note."""
    cut = capped(text, most)
    assert len(cut) <= most + len("[... 300 characters ...]")
    if len(text) <= most:
        assert cut == text
    else:
        head, _, tail = cut.partition("[... ")
        assert text.startswith(head) or "[... " in text
        assert text.endswith(tail.partition(" characters ...]")[2]) or " characters ...]" in text


def test_no_word_is_cut():
    """A part of a secret could not be recognised any more."""
    secret = "hf_" + "0123456789" * 3
    text = " ".join([secret] * 20)
    for most in range(400):
        left = capped(text, most).replace(secret, "").replace("[...", "").replace("...]", "")
        assert not set(left) - set(" 0123456789characters")
        assert "hf_" not in left
    assert capped("a" * 100, 50) == "[... 100 characters ...]"


@pytest.mark.parametrize(
    "function", [printable, lambda text: capped(text, 4000), lambda text: capped(text, len(text) - 1)]
)
def test_time_is_linear(function):
    assert steep(function) == []


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0.00 s"),
        (0.25, "0.25 s"),
        (59.94, "59.9 s"),
        (60.0, "1 min"),
        (125.4, "2 min 5 s"),
        (7_200.2, "2 h"),
        (90_000.0, "1 d 1 h"),
        (5, "5 s"),
        (float("inf"), "?"),
    ],
)
def test_times(seconds, text):
    """With two units at most."""
    assert duration(seconds) == text


@pytest.mark.parametrize(
    ("names", "shown"),
    [
        ([], ""),
        (["node-2", "node-1"], "node-2, node-1"),
        (["10.0.0.9", "10.0.0.10", "10.0.0.11", "10.0.1.1"], "10.0.0.[9-11], 10.0.1.1"),
        ([f"gpu{number:02}.site" for number in (*range(1, 65), 70)], "gpu[01-64,70].site"),
        (["n08", "n9", "n10", "n09"], "n[08-09,9-10]"),
        (["login", "n3", "head", "n1", "n2"], "login, n[1-3], head"),
        ([f"a{2 * number}" for number in range(20)], "a[0,2,4,6,8,10,12,14,16,18,20,22,...]"),
        ([*"abcdefgh", *(f"n{number}" for number in range(5))], "a, b, c, d, e, f, g, h and 5 more"),
    ],
)
def test_hosts_are_listed_as_slurm_does(names, shown):
    assert host_list(names) == shown


class Word(str):
    """A class that another process may not know."""

    __slots__ = ()


class Odd:
    def __init__(self, text):
        self.text = text

    def __str__(self):
        if isinstance(self.text, BaseException):
            raise self.text
        return self.text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (ValueError("no"), "no"),
        (Odd(Word("a word")), "a word"),
        (Odd(None), "(its text cannot be made)"),
        (Odd(SystemExit(3)), "(its text cannot be made)"),
    ],
)
def test_anything_has_a_text(value, text):
    """It is a plain str, whatever `__str__` returns or raises."""
    assert (text_of(value), type(text_of(value))) == (text, str)

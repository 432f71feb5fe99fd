"""Stop strings against the naive rule: look for the earliest one in all the text after every piece."""

from __future__ import annotations

from hypothesis import example, given, settings
from hypothesis import strategies as st

from expertserve.engine.stop import StopFilter

letters = st.text("abc", max_size=5)


def naive(pieces: list[str], stops: list[str]) -> tuple[str, bool]:
    text = ""
    for piece in pieces:
        text += piece
        found = [at for stop in stops if (at := text.find(stop)) >= 0]
        if found:
            return text[: min(found)], True
    return text, False


@settings(max_examples=400, deadline=None)
@given(st.lists(letters, max_size=12), st.lists(st.text("abc", min_size=1, max_size=6), max_size=3))
@example(["aab", "aab", "aac"], ["aabaac"])
@example(["a", "b", "c"], ["abc", "b"])
@example(["ab"], ["b", "ab"])
def test_the_text_ends_before_the_first_stop_string(pieces: list[str], stops: list[str]) -> None:
    stop_filter, sent, expected = StopFilter(stops), "", naive(pieces, stops)
    for piece in pieces:
        sent += stop_filter.push(piece)
        assert expected[0].startswith(sent), "a part of a stop string was sent"
        if stop_filter.stopped:
            break
    assert (sent + stop_filter.flush(), stop_filter.stopped) == expected


@settings(max_examples=200, deadline=None)
@given(st.lists(letters, max_size=12), st.lists(st.text("abc", min_size=1, max_size=6), min_size=1, max_size=3))
def test_no_more_is_held_back_than_could_become_a_stop_string(pieces: list[str], stops: list[str]) -> None:
    stop_filter, sent, text = StopFilter(stops), "", ""
    for piece in pieces:
        sent, text = sent + stop_filter.push(piece), text + piece
        if stop_filter.stopped:
            return
        held = text[len(sent) :]
        assert not held or any(stop.startswith(held) and stop != held for stop in stops)


def test_without_stop_strings_text_passes_at_once() -> None:
    assert StopFilter(()).push("anything") == "anything"

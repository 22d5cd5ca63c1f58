from __future__ import annotations

import itertools
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from duodecoding.errors import UsageError, VocabularyMismatch
from duodecoding.text import Detokenizer, StopStrings, check_pair, render_chat

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
HELLO = [{"role": "user", "content": "Hello"}]


def render(template: str | None, messages: object = HELLO, model: str = "tiny") -> str:
    return render_chat(template, messages, bos="<s>", eos="</s>", model=model)  # type: ignore[arg-type]


def pieces_of(data: bytes, cuts: list[int]) -> list[bytes]:
    places = [0, *sorted(cut % (len(data) + 1) for cut in cuts), len(data)]
    return [data[start:end] for start, end in itertools.pairwise(places)]


def detokenize(pieces: list[bytes]) -> list[str]:
    detokenizer = Detokenizer(pieces.__getitem__)
    return [*(detokenizer.feed(token) for token in range(len(pieces))), detokenizer.flush()]


# Detokenizer


@given(st.text(), st.lists(st.integers(0, 10_000)))
def test_any_split_of_a_text_gives_the_text(text: str, cuts: list[int]) -> None:
    assert "".join(detokenize(pieces_of(text.encode(), cuts))) == text


@given(st.binary(), st.lists(st.integers(0, 10_000)))
def test_any_split_of_any_bytes_gives_what_the_whole_gives(data: bytes, cuts: list[int]) -> None:
    assert "".join(detokenize(pieces_of(data, cuts))) == data.decode(errors="replace")


@given(st.text(min_size=1))
def test_no_half_character_and_nothing_late(text: str) -> None:
    data = text.encode()
    out = detokenize([bytes([byte]) for byte in data])
    assert out[-1] == ""
    for end in range(len(data) + 1):
        assert "".join(out[:end]) == data[:end].decode(errors="ignore")


def test_half_a_character_at_the_end_is_replaced_only_there() -> None:
    assert detokenize([b"a", b"\xf0\x9f", b"\x98"]) == ["a", "", "", "\ufffd"]


def test_invalid_bytes_are_replaced_as_soon_as_that_is_certain() -> None:
    assert detokenize([b"\xff", b"\xe2\x82", b"x"]) == ["\ufffd", "", "\ufffdx", ""]


def test_control_tokens_are_silent() -> None:
    assert detokenize([b"\xc3", b"", b"\xa9"]) == ["", "", "é", ""]


# StopStrings


def cut(text: str, stops: list[str]) -> tuple[str, bool]:
    start = min((text.find(stop) for stop in stops if stop in text), default=-1)
    return (text, False) if start < 0 else (text[:start], True)


def stream(parts: list[str], stops: list[str]) -> tuple[list[str], bool]:
    filter_ = StopStrings(stops)
    out = []
    for part in parts:
        text, stopped = filter_.feed(part)
        out.append(text)
        if stopped:
            assert filter_.feed("more") == ("", True)
            break
    out.append(filter_.flush())
    return out, filter_.stopped


few_letters = st.text("ab\n", max_size=12)


@given(few_letters, st.lists(st.text("ab\n", min_size=1, max_size=5), max_size=4), st.lists(st.integers(0, 100), max_size=6))
def test_any_split_is_cut_where_the_whole_text_would_be(text: str, stops: list[str], cuts: list[int]) -> None:
    places = [0, *sorted(place % (len(text) + 1) for place in cuts), len(text)]
    parts = [text[start:end] for start, end in itertools.pairwise(places)]
    out, stopped = stream(parts, stops)
    assert ("".join(out), stopped) == cut(text, stops)


@given(few_letters, st.lists(st.text("ab\n", min_size=1, max_size=5), max_size=4))
def test_what_is_held_back_might_begin_a_stop_string(text: str, stops: list[str]) -> None:
    filter_ = StopStrings(stops)
    emitted = ""
    for end, letter in enumerate(text, 1):
        now, stopped = filter_.feed(letter)
        emitted += now
        if stopped:
            break
        held = text[len(emitted) : end]
        assert not held or any(stop.startswith(held) for stop in stops)


@pytest.mark.parametrize(
    ("parts", "stops", "expected", "stopped"),
    [
        (["Hello", " world"], [], ["Hello", " world", ""], False),
        (["one\n", "\ntwo"], ["\n\n"], ["one", "", ""], True),
        (["one\n", "two"], ["\n\n"], ["one", "\ntwo", ""], False),
        (["one", "\n"], ["\n\n"], ["one", "", "\n"], False),
        (["say END now"], ["END"], ["say ", ""], True),
        (["aab"], ["ab"], ["a", ""], True),
        (["x", "y"], ["x"], ["", ""], True),
        (["1 b a"], ["a", "b"], ["1 ", ""], True),
    ],
)
def test_stop_strings(parts: list[str], stops: list[str], expected: list[str], stopped: bool) -> None:
    assert stream(parts, stops) == (expected, stopped)


def test_a_longer_stop_string_that_began_earlier_wins() -> None:
    assert stream(["a", "b", "c"], ["abc", "b"]) == (["", "", "", ""], True)
    assert stream(["a", "b", "d"], ["abc", "b"]) == (["", "", "a", ""], True)
    assert stream(["a", "b"], ["abc", "b"]) == (["", "", "a"], True)


@pytest.mark.parametrize("stops", ["END", [""], ["a", ""]])
def test_useless_stop_strings_are_refused(stops: list[str]) -> None:
    with pytest.raises(UsageError, match="non-empty"):
        StopStrings(stops)


# render_chat


def test_chat_is_rendered_by_the_template() -> None:
    assert render(CHATML) == "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
    plain = render_chat(CHATML, HELLO, bos="", eos="", add_generation_prompt=False)
    assert plain == "<|im_start|>user\nHello<|im_end|>\n"


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{{ bos_token }}{{ messages[0].content }}{{ eos_token }}", "<s>Hello</s>"),
        ("  {% if true %}\n  x\n  {% endif %}\ny", "  x\ny"),
        ("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}", "01"),
        ("{{ {'a': '<é>'} | tojson }}", '{"a": "<é>"}'),
        ("{{ [1] | tojson(indent=2) }}", "[\n  1\n]"),
        ("{% generation %}{{ messages[0].content }}{% endgeneration %}!", "Hello!"),
        ("{% if tools is not none %}tools{% endif %}", ""),
        ("{{ strftime_now('%Y') | length }}", "4"),
        ("{{ nothing }}", ""),
        ("{% set ns = namespace(n=1) %}{% set ns.n = 2 %}{{ ns.n }}", "2"),
        ("", ""),
    ],
)
def test_what_templates_of_the_hub_use(template: str, expected: str) -> None:
    assert render(template) == expected


def test_no_template() -> None:
    with pytest.raises(UsageError, match=r"^tiny has no chat template.*--raw"):
        render(None)
    with pytest.raises(UsageError, match=r"^this model has no chat template"):
        render(None, model="")


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{% if %}", "syntax error: line 1"),
        ("{% endfor %}", "syntax error"),
        ("{{ raise_exception('roles must alternate') }}", "does not take these messages: roles must alternate"),
        ("{{ ''.__class__.__mro__ }}", "may not do"),
        ("{{ messages.append(1) }}", "may not do"),
        ("{{ messages[0].content + 1 }}", "failed: TypeError"),
        ("{{ nothing.nothing }}", "does not take these messages: 'nothing' is undefined"),
        ("{{ 1 // 0 }}", "failed: ZeroDivisionError"),
        ("{% for i in range(10 ** 9) %}{% endfor %}", "failed: OverflowError"),
    ],
)
def test_a_bad_template_is_explained(template: str, reason: str) -> None:
    with pytest.raises(UsageError, match="the chat template of tiny ") as caught:
        render(template)
    assert reason in str(caught.value)
    assert "--raw" in str(caught.value)


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        ([], "no messages"),
        ("Hello", "messages is a str"),
        ({"role": "user", "content": "x"}, "messages is a dict"),
        (None, "messages is a NoneType"),
        (["Hello"], "message 1 is a str"),
        ([*HELLO, {"content": "x"}], "message 2 has no role"),
        ([{"role": "user"}], "message 1 has no content"),
        ([{"role": 1, "content": "x"}], "role of message 1 is 1"),
        ([{"role": "user", "content": None}], "content of message 1 is None"),
        ([{"role": "", "content": "x"}], "role of message 1 is empty"),
    ],
)
def test_malformed_messages_are_explained(messages: object, reason: str) -> None:
    with pytest.raises(UsageError) as caught:
        render(CHATML, messages)
    assert reason in str(caught.value)


# check_pair


@dataclass
class Words:
    words: list[str]
    end_tokens: frozenset[int] = frozenset()
    chat_template: str | None = None
    bos_text: str = ""
    eos_text: str = ""
    size: int = field(init=False)

    def __post_init__(self) -> None:
        self.size = len(self.words)

    def tokenize(self, text: str, *, special: bool, bos: bool) -> list[int]:
        raise NotImplementedError

    def piece(self, token: int) -> bytes:
        return self.words[token].encode()

    def texts(self) -> list[str]:
        return self.words


def mismatch(target: list[str], draft: list[str]) -> str:
    with pytest.raises(VocabularyMismatch) as caught:
        check_pair(Words(target), Words(draft), target_name="big", draft_name="small")
    return str(caught.value)


def test_the_same_vocabulary_passes_whatever_ends_the_answer() -> None:
    check_pair(Words(["a", "b"], frozenset({0})), Words(["a", "b"], frozenset({1})), target_name="big", draft_name="small")


@pytest.mark.parametrize("surplus", [1, 128])
def test_padding_passes_on_either_side(surplus: int) -> None:
    short, long = ["a", "b"], ["a", "b", *["[PAD]"] * surplus]
    check_pair(Words(short), Words(long), target_name="big", draft_name="small")
    check_pair(Words(long), Words(short), target_name="big", draft_name="small")


def test_another_size_is_refused() -> None:
    message = mismatch(["x"] * 200, ["x"] * 71)
    assert "small cannot draft for big" in message
    assert "71 tokens in the draft, 200 in the target" in message


def test_other_text_is_refused_with_the_first_example() -> None:
    message = mismatch(["a", "b", "c", "d"], ["a", " B", "c", "D"])
    assert "2 of 4 token ids" in message
    assert "the first, 1 is ' B' in the draft, 'b' in the target" in message
    assert "--draft lookup" in message

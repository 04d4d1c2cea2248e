"""How like two answers are, against a distance worked the long way."""

from hypothesis import given
from hypothesis import strategies as st

from api.inference import compare
from api.inference.compare import distance

TEXT = st.text("abcde", max_size=25)


def long_way(one: str, other: str) -> int:
    row = list(range(len(other) + 1))
    for place, letter in enumerate(one, 1):
        below = [place]
        for at, want in enumerate(other, 1):
            below.append(min(row[at] + 1, below[-1] + 1, row[at - 1] + (letter != want)))
        row = below
    return row[-1]


@given(TEXT, TEXT)
def test_the_distance_is_levenshteins(one: str, other: str) -> None:
    assert distance(one, other) == long_way(one, other)


def test_known_distances() -> None:
    assert [distance("kitten", "sitting"), distance("", "abc"), distance("flaw", "lawn")] == [3, 3, 2]


def test_json_is_equal_whatever_its_spaces_and_order() -> None:
    assert compare.json_equal('{"a": 1, "b": [2]}', '{"b":[2],"a":1}') is True
    assert compare.json_equal('{"a": 1}', '{"a": 2}') is False
    assert compare.json_equal('{"a": 1}', "no json") is False
    assert compare.json_equal("The answer is 1", '{"a": 1}') is None
    assert compare.json_equal("[" * 100_000, "x") is None


def test_answers_are_read_whichever_way_they_came() -> None:
    whole = b'{"choices":[{"message":{"content":"The sea","tool_calls":null}}],"usage":{"completion_tokens":2}}'
    pieces = (
        b'data: {"choices":[{"delta":{"role":"assistant"}}]}\n\ndata: {"choices":[{"delta":{"content":"The "}}]}\n\n'
        b'data: {"choices":[{"delta":{"content":"sea"}}]}\n\ndata: [DONE]\n\n'
    )
    assert compare.text_of_answer(whole) == compare.text_of_stream(pieces) == "The sea"
    assert compare.output_tokens(whole) == 2
    tool = b'{"choices":[{"message":{"tool_calls":[{"function":{"name":"f","arguments":"{\\"x\\":1}"}}]}}]}'
    assert compare.text_of_answer(tool) == 'f{"x":1}'
    for broken in (b"", b"[]", b'{"choices":[]}', b'{"choices":3}', b'{"choices":[[]]}'):
        assert compare.text_of_answer(broken) == ""


def test_unlike_is_more_than_half_different() -> None:
    assert compare.is_unlike(compare.compare("tides", "gates", 1, 1)) is True
    assert compare.is_unlike(compare.compare("the tide rises", "the tide falls", 3, 3)) is False
    assert compare.is_unlike(compare.compare('{"a":1}', '{ "a" :    1                  }', 3, 9)) is False

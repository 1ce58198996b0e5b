"""The positioned JSON reader: agrees with the standard one on JSON, and places every mistake."""

from __future__ import annotations

import json

import pytest
from config_models import marked
from hypothesis import given
from hypothesis import strategies as st

from amct.config.json_reader import MAX_DEPTH, read_json
from amct.config.simple_config import format_json
from amct.errors import ParseError

TEXTS = st.text(st.characters(exclude_categories=["Cs"]))
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXTS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXTS, inner, max_size=4),
    max_leaves=20,
)

MISTAKES = {
    "two braces": ("{\n@{\n", r"expected a key in double quotes or \"}\", found '{'"),
    "trailing comma in an object": ('{"a": 1@,\n}', 'the comma before "}" has nothing after it. Remove the comma'),
    "trailing comma in a list": ('{"a": [1, 2@, ]}', 'the comma before "]" has nothing after it'),
    "single quotes": ("{@'a': 1}", "expected a key in double quotes"),
    "missing colon": ('{"a" @1}', 'expected ":" after the key "a", found \'1\''),
    "missing comma": ('{"a": 1\n @"b": 2}', 'expected "," or "}", found'),
    "missing value": ('{"a": @}', "expected a value, found '}'"),
    "cut off": ('{"a": {"b": 1@', 'expected "," or "}", found the end of the file'),
    "nothing": ("@", "expected a value, found the end of the file"),
    "two documents": ('{"a": 1}\n@{}', "expected the end of the file after the closing bracket"),
    "NaN": ('{"a": @NaN}', "expected a value, found 'NaN'"),
    "Infinity": ('{"a": @-Infinity}', "is not a JSON number"),
    "too large": ('{"a": @1e999}', "1e999 is too large for a number"),
    "too long": ('{"a": @' + "9" * 5000 + "}", "a number of 5000 characters is too long"),
    "leading zero": ('{"a": @01}', "'01' is not a JSON number"),
    "no digits": ('{"a": @1.}', "'1.' is not a JSON number"),
    "plus": ('{"a": @+1}', r"expected a value, found '\+1'"),
    "other digits": ('{"a": @٣}', "is not a JSON number"),
    "True": ('{"a": @True}', "expected a value, found 'True'"),
    "open string": ('{"a": @"b', "the string that begins here is never closed"),
    "line end in a string": ('{"a": "b@\n"}', "control character"),
    "escape": ('{"a": "b@\\x"}', "does not exist in JSON"),
    "short escape": ('{"a": "@\\u12"}', "needs four hexadecimal digits"),
    "half a pair": ('{"a": @"\\ud83d"}', "half a surrogate pair"),
    "wrong pair": ('{"a": @"\\ud83d\\u0041"}', "half a surrogate pair"),
    "comment": ('{@// no\n"a": 1}', "expected a key in double quotes"),
    "deep": ("[" * MAX_DEPTH + "@[", f"nested deeper than {MAX_DEPTH} levels"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistake(name):
    text, [(line, column)] = marked(MISTAKES[name][0])
    with pytest.raises(ParseError, match=MISTAKES[name][1]) as caught:
        read_json(text, "f.json")
    assert (caught.value.position.line, caught.value.position.column) == (line, column)


@pytest.mark.parametrize(
    ("data", "place"),
    [(b'{"a":\n "\xff"}', (2, 3)), ('{"a": 1}'.encode("utf-16"), (1, 1)), ('{"ä": 1}'.encode("latin-1"), (1, 3))],
    ids=["stray byte", "utf-16", "latin-1"],
)
def test_bytes_that_are_not_utf8(data, place):
    with pytest.raises(ParseError, match=r"is not valid UTF-8\. Save the file as UTF-8 text") as caught:
        read_json(data, "f.json")
    assert (caught.value.position.line, caught.value.position.column) == place


@pytest.mark.parametrize("data", ['\ufeff{"a": 1}', '\ufeff{"a": 1}'.encode()])
def test_a_byte_order_mark_is_no_mistake(data):
    assert read_json(data, "f.json").root.plain() == {"a": 1}


def test_repeated_keys_are_listed_and_the_first_is_kept():
    text, places = marked('{"a": 1, "b": {"c": 1,\n @"c": 2}, @"a": 3}')
    document = read_json(text, "f.json")
    assert document.root.plain() == {"a": 1, "b": {"c": 1}}
    assert [(problem.position.line, problem.position.column) for problem in document.problems] == places
    assert (
        str(document.problems[1]) == 'f.json:2:11: the key "a" is repeated (first given in line 1). Keep one of them.'
    )


def test_every_key_and_value_has_its_place():
    text, places = marked('{\r\n  @"a": @[1, @{@"b": @true}]\r}')
    root = read_json(text, "f.json").root
    nodes = [root.at(("a",)), root.at(("a", 1)), root.at(("a", 1, "b"))]
    found = [nodes[0].key_position, nodes[0].position, nodes[1].position, nodes[2].key_position, nodes[2].position]
    assert [(position.line, position.column) for position in found] == places
    assert root.at(("a", 7, "x")) is nodes[0]
    assert nodes[1].key_position == nodes[1].position


@given(VALUES)
def test_agrees_with_the_standard_reader(value):
    for text in (json.dumps(value), json.dumps(value, ensure_ascii=False, indent=3)):
        assert read_json(text, "f.json").root.plain() == json.loads(text)
        assert repr(read_json(text.encode(), "f.json").root.plain()) == repr(json.loads(text))


@given(st.dictionaries(TEXTS, VALUES, max_size=4))
def test_what_is_written_reads_back(value):
    assert read_json(format_json(value), "f.json").root.plain() == value


def finite(text: str) -> float:
    number = float(text)
    if number in (float("inf"), float("-inf")):
        raise ValueError(text)
    return number


@given(st.text(alphabet='{}[]:,"\\ \n1eE.+-tfnu', max_size=40) | VALUES.map(json.dumps).map(lambda text: text[:-1]))
def test_accepts_exactly_what_the_standard_reader_accepts(text):
    """Apart from infinity, which the standard reader takes."""
    try:
        expected = json.loads(text, parse_float=finite)
    except ValueError:
        with pytest.raises(ParseError):
            read_json(text, "f.json")
    else:
        document = read_json(text, "f.json")
        assert document.problems or document.root.plain() == expected

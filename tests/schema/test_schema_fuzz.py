"""Nothing a file can hold makes a reader fail otherwise than with ParseError; time grows with the length alone."""

import random
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from amct.errors import ParseError
from amct.schema import descriptor, message_class, parse_text, read_binary

CONFIG = descriptor("AMCTPytorchProto.AMCTConfig", schema="pytorch")
RETRAIN = descriptor("AMCTPytorchProto.AMCTRetrainConfig", schema="pytorch")
RECORD = message_class("AMCTPytorchProto.ScaleOffsetRecord", schema="pytorch")
CAFFE_CONFIG = descriptor("AMCTCaffeProto.AMCTConfig", schema="caffe_config")
CAFFE_RECORD = descriptor("AMCTCaffeProto.ScaleOffsetRecord", schema="caffe_config")

SAMPLES = {
    "samples/ptq.cfg": CONFIG,
    "samples/prune_int8.cfg": RETRAIN,
    "samples/caffe_snq.cfg": CAFFE_CONFIG,
    "samples/caffe_record_without_brace.txt": CAFFE_RECORD,
    "records/prune_03_ascend.txt": RECORD.DESCRIPTOR,
}
PIECES = [
    *"{}<>[]:;,-#'\"\\\n \t.+0f",
    "batch_num", "common_config", "skip_layers", "arq_quantize", "quant_bits", "do_fusion", "true", "inf", "nan",
    "1e999", "0x", "09", "-1", '"a"', "'b'", "\\x4", "\\u", "\ufeff", "\u3000", "卷", "\ud800", "\0", "9" * 500,
    "x" * 300,
]  # fmt: skip


def read(text, message):
    """Read it; every error but ParseError gets through, and a ParseError must say where."""
    caught = None
    try:
        parse_text(text, message, "fuzz").to_message()
    except ParseError as error:
        caught = error
    if caught is not None:
        assert caught.position is not None
        assert caught.position.line >= 1
        assert caught.position.column >= 1


def read_bytes(data):
    caught = None
    try:
        read_binary(data, RECORD, "fuzz")
    except ParseError as error:
        caught = error
    assert caught is None or str(caught).startswith("fuzz: ")


@given(data=st.binary(max_size=200))
def test_random_bytes(data):
    read(data, CONFIG)


@given(text=st.text(max_size=100))
def test_random_text(text):
    read(text, CONFIG)


@settings(max_examples=300)
@given(pieces=st.lists(st.sampled_from(PIECES), max_size=40))
def test_random_words_of_the_language(pieces):
    read("".join(pieces), CONFIG)
    read(" ".join(pieces), CONFIG)


@given(data=st.binary(max_size=200))
def test_random_binary(data):
    read_bytes(data)


@pytest.mark.parametrize("name", SAMPLES)
def test_truncated_samples(golden, name):
    data = (golden / "schema" / name).read_bytes()
    for length in range(len(data)):
        read(data[:length], SAMPLES[name])


@pytest.mark.parametrize("name", SAMPLES)
def test_mutated_samples(golden, name):
    data = (golden / "schema" / name).read_bytes()
    chance = random.Random(name)
    for _ in range(300):
        mutated = bytearray(data)
        for _ in range(chance.randint(1, 4)):
            start = chance.randrange(len(mutated))
            replacement = chance.choice(
                [b"", chance.randbytes(chance.randint(1, 3)), chance.choice(PIECES).encode("utf-8", "replace")]
            )
            mutated[start : start + chance.randint(0, 6)] = replacement
        read(bytes(mutated), SAMPLES[name])


def test_truncated_and_mutated_binary(golden):
    text = (golden / "schema" / "records" / "prune_03_ascend.txt").read_bytes()
    data = parse_text(text, RECORD.DESCRIPTOR, "record").to_message().SerializeToString()
    chance = random.Random(7)
    for length in range(len(data)):
        mutated = bytearray(data)
        mutated[length] = chance.randrange(256)
        read_bytes(data[:length])
        read_bytes(bytes(mutated))


HOSTILE = """
"x" * n
"batch_num" + " " * n + "@"
"batch_num:" + " " * n + "@"
" " * n + "@"
"#" * n + "\\n@"
"# a\\n" * n + "@"
"\\n#" * n
"skip_layers: " + '"a" ' * n
"skip_layers: " + "'\\"' " * n
'skip_layers: "' + "\\\\n" * n
'skip_layers: "' + "\\\\n" * n + '"'
'skip_layers: "\\\\xff' + "a" * n + '"'
"skip_layers: [" + '"a",' * n
"batch_num: " + "1e+" * n
"batch_num: " + "9" * n
"do_fusion: " + "t" * n
"zzz {" + "y: 1 " * n + "}"
"}" * n
"x{" * n
"x:[{" * n
"skip_layers:[" * n
"batch_num: 1\\n;" * n
"batch_num:" * n
"batch_num: " + "- " * n
"x: " + '"' * n
"override_layer_configs: [" + "{}," * n
"common_config: { arq_quantize: { quant_bits: 3 } } " * (n // 10)
"common_config: { arq_quantize: { } ada_quantize { } } " * (n // 10)
""".strip().splitlines()


@pytest.mark.skipif(sys.platform == "win32", reason="limits of processor time are a Unix thing")
def test_hostile_texts_cost_little():
    """Texts that make careless patterns backtrack, 100 000 long each; quadratic work in one takes over a minute.

    All of them take about four seconds of processor time together; the process may have sixty.
    """
    program = f"""
import resource
resource.setrlimit(resource.RLIMIT_CPU, (60, 60))
from amct.errors import ParseError
from amct.schema import descriptor, parse_text
config = descriptor("AMCTPytorchProto.AMCTConfig", schema="pytorch")
n = 100_000
for expression in {HOSTILE!r}:
    try:
        parse_text(eval(expression), config, "hostile").to_message()
    except ParseError:
        pass
print("done")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, "done"), done.stderr


@pytest.mark.parametrize("expression", HOSTILE)
def test_steps_grow_with_the_length_alone(expression):
    """Four times the text costs at most about four times the steps of the interpreter."""
    assert _steps(eval(expression, {"n": 8000})) <= 4.5 * _steps(eval(expression, {"n": 2000})) + 2000


def _steps(text):
    steps = 0

    def count(frame, event, argument):  # noqa: ARG001 - the shape sys.settrace wants
        nonlocal steps
        steps += 1
        return count

    previous = sys.gettrace()
    sys.settrace(count)
    try:
        read(text, CONFIG)
    finally:
        sys.settrace(previous)
    return steps

"""Every command and code block of README and docs runs, in the order in which they stand on the page."""

from __future__ import annotations

import inspect
import multiprocessing
import re
import shlex

import pytest
import typer
from document_runner import NOT_CODE, PYTHON, ROOT, SHELLS, Block, Command, blocks, commands, run_command, run_page

from amct.cli.app import app

PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])
CHINESE = [page for page in PAGES if page.name.endswith(".zh-CN.md")]
WITH_CODE = [page for page in PAGES if page not in CHINESE and any(block.runs for block in blocks(page))]
SECONDS = 300


@pytest.fixture(scope="module")
def processes():
    """Processes forked from one that has the large libraries loaded: a page then starts at once, and alone."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "onnxscript", "onnxruntime", "amct.pytorch", "amct.caffe"])
    return context


@pytest.mark.parametrize("page", WITH_CODE, ids=lambda page: page.name)
def test_code_of_a_page_runs(page, tmp_path, processes):
    folder = tmp_path / "page"
    folder.mkdir()
    process = processes.Process(target=run_page, args=(page, folder))
    process.start()
    process.join(SECONDS)
    assert process.exitcode == 0, (tmp_path / "output.txt").read_text()[-3000:]


def test_the_pages_with_code_are_found():
    names = {page.name for page in WITH_CODE}
    assert {
        "README.md",
        "pytorch.md",
        "caffe.md",
        "caffe-engine.md",
        "caffe-onnx.md",
        "my-accuracy-dropped.md",
    } <= names


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_block_is_of_a_known_kind(page):
    text = page.read_text()
    assert text.count("```") == 2 * len(blocks(page)), "a fence that does not stand at the beginning of its line"
    assert {block.language for block in blocks(page)} <= {PYTHON, *SHELLS, *NOT_CODE}
    for block in blocks(page):
        if block.language in NOT_CODE:
            assert not re.search(r"^(?:\$ )?(?:amct|make|pip|python) ", block.text, re.MULTILINE), "mark it as sh"


def code_of(page):
    """The code without comments, which are in the language of the page."""
    return [re.sub(r"\s*#.*", "", block.text) for block in blocks(page) if block.runs]


def english(page):
    return page.with_name(page.name.replace(".zh-CN", ""))


@pytest.mark.parametrize("page", CHINESE, ids=lambda page: page.name)
def test_a_chinese_page_has_the_code_of_the_english_one(page):
    assert code_of(page) == code_of(english(page))


def structure(page):
    """Levels of headings, languages of blocks, links and rows of tables: what does not depend on the language."""
    text = page.read_text()
    prose = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    links = [link.replace(".zh-CN", "") for link in re.findall(r"\]\(([^)]+)\)", prose)]
    return {
        "headings": [len(level) for level in re.findall(r"^(#+) ", prose, re.MULTILINE)],
        "blocks": [block.language for block in blocks(page)],
        "links": links,
        "rows": len(re.findall(r"^\|", prose, re.MULTILINE)),
    }


@pytest.mark.parametrize("page", CHINESE, ids=lambda page: page.name)
def test_a_chinese_page_follows_the_english_one(page):
    assert structure(page) == structure(english(page))


# -- commands in running text ------------------------------------------------------------------------------------------


def every_command(command, names=()):
    """All commands of the tree, by their words."""
    for name in command.list_commands(typer.Context(command)):
        inner = command.get_command(typer.Context(command), name)
        if hasattr(inner, "list_commands"):
            yield from every_command(inner, (*names, name))
        else:
            yield " ".join((*names, name)), inner


COMMANDS = dict(every_command(typer.main.get_command(app)))


def commands_in_text():
    """Commands that stand in running text, and the examples of help texts."""
    for page in PAGES:
        for text in re.findall(r"`(amct [a-z][^`\n]*)`", page.read_text()):
            yield pytest.param(text, id=f"{page.name}: {text}")
    for name, command in COMMANDS.items():
        for text in re.findall(r"Example: (amct .*(?:\n.*\S)*)", inspect.cleandoc(command.help or "")):
            yield pytest.param(text.replace("\n", " "), id=f"{name} --help: {text}")


@pytest.mark.parametrize("text", list(commands_in_text()))
def test_commands_in_the_text_exist_with_their_options(text):
    words = [word for word in shlex.split(text)[1:] if word not in ("…", "...")]
    named = [name for name in COMMANDS if words[: len(name.split())] == name.split()]
    if not named:  # the name of a group
        assert any(name.split()[: len(words)] == words for name in COMMANDS), f"there is no command {text}"
        return
    (name,) = named
    known = {option for item in COMMANDS[name].params for option in (*item.opts, *item.secondary_opts)}
    assert {word for word in words if word.startswith("-")} <= known | {"--help"}


# -- the small shell itself --------------------------------------------------------------------------------------------


def test_the_small_shell_reads_what_documents_use(tmp_path):
    block = Block(
        "sh", "make demo  # sets up\n\namct inspect \\\n  a.prototxt\ncat > a.cfg <<'END'\nbatch_num: 2\nEND\n", 1
    )
    assert commands(block) == [
        Command(("make", "demo")),
        Command(("amct", "inspect", "a.prototxt")),
        Command((), "a.cfg", "batch_num: 2\n"),
    ]
    run_command(commands(block)[2], tmp_path)
    assert (tmp_path / "a.cfg").read_text() == "batch_num: 2\n"
    assert commands(Block("console", "$ amct --version\namct 0.1\n", 1)) == [Command(("amct", "--version"))]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("make tea", "no target tea"),
        ("pip install -e .[tea]", "no extra tea"),
        ("pip install tea", "expected this project"),
        ("python examples/tea.py", "no such file"),
        ("rm -rf .", "what does this command do"),
        ("amct tea", "exit code 2"),
    ],
)
def test_the_small_shell_refuses_what_is_not_there(words, message, tmp_path):
    with pytest.raises(AssertionError, match=message):
        run_command(Command(tuple(shlex.split(words))), tmp_path)

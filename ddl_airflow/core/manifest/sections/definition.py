"""model_definition: the model, its framework and its commands."""

from __future__ import annotations

import re
import shlex
from functools import lru_cache
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from ddl_airflow.core.manifest.rule import Finding, Findings, Rule, registering
from ddl_airflow.core.manifest.sections.base import Section
from ddl_airflow.core.manifest.templates import MAX_CHARACTERS, command_findings
from ddl_airflow.core.manifest.values import (
    AnyText,
    Text,
    Unusable,
    Whole,
    has_written_secret,
    without_written_secrets,
)

MAX_DAG_ID = 200
# What a command's text consists of, to a shell; a comment of Jinja, {# see #12 #}, is part of a
# word, and its end none of its own.
_TOKENS = re.compile(
    r"""(?P<comment>\#(?!\})[^\n]*)
    | (?P<word>(?:
        \{\#(?:(?!\{\#)[^'"\\])*?\#\}
        | \\[^\n]|'[^']*'|"(?:\\.|[^"\\])*"|[^\s;&|()<>'"\\]
    )+)
    | (?P<end>;|\n\s*)
    | (?P<open>['"]|\\\Z)
    | \\\n | .""",
    re.VERBOSE | re.DOTALL,
)
# After what a command goes on, in the next line if need be; >| only names a file.
_GOES_ON = re.compile(r"(?:\|\||&&|(?<!>)\|&?)\Z")
# What is no operator of a shell, with what Jinja puts in; and what stands in parentheses.
_NO_OPERATOR = re.compile(
    r"""\{\{.*?\}\} | \{%.*?%\} | \{\#.*?\#\} | \$\{[^{}]*\} | \$\[[^][]*\]
    | \\. | '[^']*' | "(?:\\.|[^"\\])*" | `[^`]*`""",
    re.VERBOSE | re.DOTALL,
)
_IN_PARENTHESES = re.compile(r"\$?\([^()]*\)")
# The rest of what began in a command before; what would end or begin in a later one; and <<,
# after which lines follow that are no commands.
_CUT = re.compile(
    r"\A(?:then|elif|else|fi|do|done|esac|\})(?=[\s&|<>]|\Z) | [()`] | (?<!<)<<-?\s*[A-Za-z_]",
    re.VERBOSE,
)
_AND_OR_PIPE = re.compile(r"&&|\|\|?")
_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*\+?=")
# What changes only the shell that it runs in, or ends it; the first three run what they are given.
_SOURCES = frozenset(("source", ".", "eval"))
_OF_THE_SHELL = _SOURCES | frozenset(
    "cd pushd popd export declare typeset readonly set unset ulimit umask alias exit".split()
)
# What prepares a training, or looks at what there is, and trains nothing itself.
_NO_TRAINING = frozenset(
    """
    apt apt-get apk dnf yum git wget curl aws gsutil s3cmd rsync scp
    unzip zip tar gzip gunzip bzip2 bunzip2 xz unxz
    mkdir rmdir cp mv rm ln touch chmod chown ls cat head tail wc sort du df tee
    echo printf env printenv pwd date sleep true : test [ which
    hostname whoami id uname nproc lscpu free ps nvidia-smi
    """.split()
)
# What starts the program that follows.
_IN_FRONT = frozenset("! time nice nohup env sudo command exec".split())
_PYTHON = re.compile(r"python[0-9.]*")
_INSTALLS = re.compile(
    r"\b(?:pip[0-9.]*|conda|mamba|apt-get|apt|apk|dnf|yum)(?:\s+-\S+)*\s+(?:install|add)\b"
)
# How a command says that it is of parameter servers, which find each other by themselves.
FINDS_SERVERS = re.compile(r"\bPS_HOSTS_COUNT=|--(ps|worker)_hosts\b")
_PORT = "Port the script to TensorFlow or Keras, and write name: tensorflow."
# Each as a message and what to do.
FRAMEWORKS_ELSEWHERE = {
    **{
        name: (
            f"is {name}, and what trains here is TensorFlow: ranks would not average PyTorch's "
            "gradients, and its models are not published",
            f"{_PORT} Or train with torchrun and DistributedDataParallel, without a manifest.",
        )
        for name in ("pytorch", "pytorch-onnx")
    },
    **{
        name: (f"is {name}, and what trains here is TensorFlow", _PORT)
        for name in ("caffe", "caffe2", "chainer", "mxnet", "theano", "torch")
    },
    "keras": (
        "is keras, and the framework beneath it is named here",
        "Write name: tensorflow, and its version; it brings Keras.",
    ),
}
RULES: list[Rule] = []
_rule = registering(RULES)


def _author(written: Any) -> Any:
    """A name alone, and what Watson Machine Learning's templates leave empty."""
    if isinstance(written, str):
        written = {"name": written}
    if not isinstance(written, dict):
        return written
    return {name: value for name, value in written.items() if value not in (None, "")} or None


def _first(written: Any) -> Any:
    """The only one of a list, as Watson Machine Learning's documents have it."""
    return written[0] if isinstance(written, list) and len(written) == 1 else written


class Author(Section):
    """Who wrote the model."""

    name: Text = Field(description="Name, kept in the lineage.", examples=["Your Name"])
    email: Text | None = Field(
        default=None, description="Address, kept in the lineage.", examples=["you@example.com"]
    )

    def __str__(self) -> str:
        return f"{self.name} <{self.email}>" if self.email else self.name


class Runtimes(Section):
    """The language that the scripts are written in."""

    name: Literal["python"] = Field(description="Language of the scripts.", examples=["python"])
    version: Text | None = Field(
        default=None,
        description="Kept in the lineage only; `launcher.python` decides what runs.",
        examples=["3.11"],
    )


def _of_tensorflow(written: Any) -> Any:
    """Raises Unusable for what Watson Machine Learning trained besides, and this does not."""
    if isinstance(written, str) and written in FRAMEWORKS_ELSEWHERE:
        raise Unusable(*FRAMEWORKS_ELSEWHERE[written])
    return written


class Framework(Section):
    """What the scripts import."""

    name: Annotated[
        Literal["tensorflow", "tensorflow-ddl", "tensorflow-horovod"],
        BeforeValidator(_of_tensorflow),
    ] = Field(
        description="Framework; all names mean TensorFlow with the DDL ops.",
        examples=["tensorflow-ddl"],
    )
    version: Text = Field(
        description="TensorFlow version that the scripts are written for; `-py3-ddl` may follow. "
        "Below 2, `import tensorflow` gives them the 1.x API.",
        examples=["2.21"],
    )
    runtimes: Annotated[Runtimes | None, BeforeValidator(_first)] = Field(
        default=None, description="Language of the scripts.", examples=[{"name": "python"}]
    )


class ComputeConfiguration(Section):
    """How many ranks the training runs: slots per node times nodes."""

    name: Text = Field(
        description="Kind of node; decides how many ranks run on each.", examples=["v100x2"]
    )
    nodes: Whole = Field(default=1, ge=1, le=4096, description="Number of nodes.", examples=[2])


class Execution(Section):
    """What runs, and on how many ranks."""

    command: Text = Field(
        description="The first command runs on all ranks; those after `;` run once, after it.",
        examples=["python train.py"],
    )
    compute_configuration: ComputeConfiguration = Field(
        description="Where and how often it runs.", examples=[{"name": "v100", "nodes": 2}]
    )


class ModelDefinition(Section):
    """The model: its name, framework and command."""

    name: Text = Field(
        description="Name of the model; the DAG id is made from it.", examples=["tf-mnist"]
    )
    author: Annotated[Author | None, BeforeValidator(_author)] = Field(
        default=None, description="Who wrote the model.", examples=[{"name": "Your Name"}]
    )
    description: AnyText = Field(
        default="", description="A sentence for the DAG list.", examples=["Digits, two layers"]
    )
    framework: Framework = Field(
        description="What the scripts import.",
        examples=[{"name": "tensorflow-ddl", "version": "2.21"}],
    )
    execution: Execution = Field(
        description="What runs, and on how many ranks.",
        examples=[{"command": "python train.py", "compute_configuration": {"name": "v100"}}],
    )


def slug(name: str) -> str:
    """Returns the name with what is outside A-Z a-z 0-9 _ . - as one ``-``; may be empty.

    It never starts or ends with a dot or a dash: it names a folder, and ``..`` is no name.
    """
    return re.sub(r"[^A-Za-z0-9_.-]+", "-", name).strip("-.")


@lru_cache(1024)  # asked several times of each manifest, and many have the same
def split_commands(text: str) -> tuple[str, ...]:
    """Returns the commands in a text; ``;`` and line ends outside quotes separate them.

    Quotes, backslashes and comments mean what they mean in a POSIX shell, and a line's end after
    ``|``, ``||`` or ``&&`` too: the command goes on.

    Raises:
        ValueError: quotes that do not close, a backslash at the end, or nothing after ``|``.
    """
    pieces: list[list[str]] = [[]]
    operators = ""  # since the last word
    for token in _TOKENS.finditer(text):
        kind, piece = token.lastgroup, token[0].replace("\\\n", " ")
        if kind == "open":
            what = "ends in a backslash" if piece == "\\" else f"has a {piece} that never closes"
            raise ValueError(what)
        if kind == "end" and piece != ";" and _GOES_ON.search(operators):
            pieces[-1].append(" ")
        elif kind == "end":
            _check_end(operators)
            pieces.append([])
            operators = ""
        elif kind != "comment":
            pieces[-1].append(piece)
            operators = "" if kind == "word" else operators + piece.strip()
    _check_end(operators)
    return tuple(filter(None, ("".join(parts).strip() for parts in pieces)))


def _check_end(operators: str) -> None:
    """Raises ValueError if a command ends in an operator that wants one more."""
    if found := _GOES_ON.search(operators):
        raise ValueError(f"ends in {found[0]}")


@_rule("model_definition.name")
def name_gives_a_dag_id(at: str, name: str) -> Findings:
    made = slug(name)
    length = len(made)
    if length == 0:
        yield Finding(at, "has no letter or digit to make a DAG id of", "Use A-Z, a-z, 0-9.")
    elif length > MAX_DAG_ID:
        yield Finding(at, f"has {length} characters, at most {MAX_DAG_ID} fit", "Shorten it.")
    elif made.startswith("__") and made.endswith("__"):
        # A loader puts its DAGs beside those: a DAG `__file__` would hide all of them to Airflow.
        message = f"gives the DAG id {made!r}, and such names are Python's own"
        yield Finding(at, message, "Write it without the __ at both ends.")


@_rule("model_definition.name", warning=True)
def name_keeps_its_letters(at: str, name: str) -> Findings:
    made = slug(name)
    if made and any(char.isalnum() and not char.isascii() for char in name):
        fix = f"Write it in A-Z, a-z, 0-9, _, . and -; or {made!r}, if that is meant."
        yield Finding(at, f"is {name[:60]!r}, of which the DAG id becomes {made[:60]!r}", fix)


@_rule("model_definition.framework.version")
def version_is_known(at: str, version: str) -> Findings:
    match = re.fullmatch(r"([0-9]{1,4})(\.[0-9]+)*([-+.]?[A-Za-z][\w.+-]*)?", version)
    if match is None:
        yield Finding(at, f"is {version[:40]!r}, not a version", 'Write for example "2.21".')
    elif int(match[1]) == 0:
        fix = 'Port the script to the API of 1.x and write "1.15", or to 2.x and write "2.21".'
        yield Finding(at, f"is {version}, older than TensorFlow 1", fix)


@_rule("model_definition.execution.command")
def command_can_be_split(at: str, command: str) -> Findings:
    """Also said of other commands, which a shell has to read to their end as well."""
    try:
        commands = split_commands(command)
    except ValueError as error:
        yield Finding(
            at, str(error), "Close or complete it, or put \\ before a character meant as it is."
        )
        return
    if not commands or not all(map(_names_a_program, commands)):
        yield Finding(at, "is empty", 'Write for example "python train.py".')


@_rule("model_definition.execution.command")
def commands_are_complete(at: str, command: str) -> Findings:
    """Each runs by itself: the first as the training, and the others once, after it."""
    if len(command) > MAX_CHARACTERS:
        return  # nested ever deeper, it would take ever longer
    try:
        commands = split_commands(command)
    except ValueError:  # said by another rule
        return
    bare = [_bare(one) for one in commands]
    if len(commands) > 1:
        for one, text in zip(commands, bare, strict=True):
            if _CUT.search(text):
                message = f"{_shown(one)!r} is only a part: ; and a line's end end each command"
                fix = "Write bash -c '…' around the whole, or put it into a script."
                yield Finding(at, message, fix)
                return
    alone: list[str] = []
    for one, text in zip(commands, bare, strict=True):
        simple = [words.split() for words in _AND_OR_PIPE.split(text)]
        changes = all(map(_changes_its_shell, simple))
        assigns = [all(map(_ASSIGNMENT.match, words)) for words in simple]
        sources = any(words[0] in _SOURCES for words in simple if words)
        if changes and not sources and (one == commands[-1] or (any(assigns) and simple[1:])):
            fix = "Write what it sets in front of one: NAME=value python train.py."
            yield Finding(at, f"{_shown(one)!r} runs no program", fix)
            return
        if changes:
            alone.append(f"export {one}" if assigns == [True] else one)
        elif alone:
            message = f"{_shown(alone[0])!r} would run by itself: after ; another shell begins"
            joined = _shown(" && ".join([*alone, one]), 200)
            yield Finding(at, message, f"Join them with &&: {joined}.")
            return
    prepare = [_trains_nothing(text) for text in bare]
    if prepare[:1] == [True] and not all(prepare):
        message = f"{_shown(commands[0])!r} would be the training: the first of several commands is"
        joined = _shown(" && ".join(commands[: prepare.index(False) + 1]), 200)
        fix = f"Join them with &&: {joined}."
        yield Finding(at, f"{message}, and those after it run once", fix)


@_rule("model_definition.execution.command")
def command_begins_with_a_program(at: str, command: str) -> Findings:
    try:
        first = split_commands(command)[:1]
    except ValueError:  # said by another rule
        return
    if first and first[0].startswith("-"):
        message = f"{_shown(first[0])!r} begins with an option, of mpirun perhaps, and no program"
        fix = "Delete it; for mpirun's -x NAME=value write NAME=value in front of the program."
        yield Finding(at, message, fix)


@_rule("model_definition.execution.command", warning=True)
def nothing_is_installed(at: str, command: str) -> Findings:
    if _INSTALLS.search(command):
        message = "installs packages at each start, on all ranks at once and in no container"
        fix = "Install them once in the ranks' Python, which launcher.python can name, instead."
        yield Finding(at, message, fix)


def _trains_nothing(command: str) -> bool:
    """Whether all that a command runs is known not to train; as ``_bare`` gives it."""
    return all(_prepares(words.split()) for words in _AND_OR_PIPE.split(command))


def _prepares(words: list[str]) -> bool:
    if _changes_its_shell(words):
        return not any(word in _SOURCES for word in words)
    left = [word for word in words if not _ASSIGNMENT.match(word)]
    while left[1:] and left[0].rpartition("/")[2] in _IN_FRONT:
        del left[0]
    program, given = left[0].rpartition("/")[2], left[1:]
    if _PYTHON.fullmatch(program):
        return given[:2] == ["-m", "pip"] or given in (["-V"], ["--version"])
    if program in ("conda", "mamba"):
        return given[:1] != ["run"]
    return program in _NO_TRAINING or re.fullmatch("pip[0-9.]*", program) is not None


def _bare(command: str) -> str:
    """The command with x for all in quotes, in whole parentheses or by Jinja."""
    text, count = _NO_OPERATOR.sub("x", command), 1
    while count:
        text, count = _IN_PARENTHESES.subn("x", text)
    return text


def _changes_its_shell(words: list[str]) -> bool:
    program = next((word for word in words if not _ASSIGNMENT.match(word)), None)
    return program is None or program in _OF_THE_SHELL


def _shown(command: str, most: int = 60) -> str:
    return without_written_secrets(command)[:most]


def _names_a_program(command: str) -> bool:
    """Whether the first word of a command, which begins with no space, has a character."""
    quoted = "'" in command or '"' in command or "\\" in command
    return bool(shlex.split(command)[0]) if quoted else True


@_rule("model_definition.execution.command")
def command_has_values_as_words_only(at: str, command: str) -> Findings:
    try:
        commands = split_commands(command)
    except ValueError:  # said by another rule
        return
    yield from command_findings(at, commands)


@_rule("model_definition.execution.command", warning=True)
def command_has_no_secret(at: str, command: str) -> Findings:
    if has_written_secret(command):
        message = "may hold a secret; what a command sets is in logs and in the list of processes"
        yield Finding(at, message, "Have the script read it where only it may.")

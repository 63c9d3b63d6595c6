"""Values in commands: wherever a template may stand, /bin/sh and bash take its value as a word."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import time

import pytest
from ddl_ops.command_line import command_argv
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from jinja2.sandbox import SandboxedEnvironment

from ddl_airflow.core.manifest.templates import command_findings
from ddl_airflow.core.parameters import word_of
from tests.limits import within

_COUNT = int(os.environ.get("DDL_GENERATED", "300"))
# The suite tries the same each time; make fuzz tries others.
_SAME = "DDL_GENERATED" not in os.environ
_ENVIRONMENT = SandboxedEnvironment(finalize=word_of, autoescape=False)


def refusals(command: str) -> list[str]:
    return [found.message for found in command_findings("command", [command])]


@pytest.mark.parametrize(
    "command",
    [
        "python train.py {{ params.who }}",
        "python train.py --name={{ params.who }} --data ${DATA_DIR}/x{{ params.who }}",
        "WHO={{ params.who }} python -u train.py",
        "env WHO={{ params.who }} python -u train.py {{ params.who }}",
        "python train.py 'a {b' \"c $HOME\" {{ params.who }}{{ params.who }}",
        "nice -n 10 python train.py {{ params.who }} | tee out.txt",
        "python train.py {{ params.who }} > log.txt 2>&1",
        "if test -e x; then python train.py {{ params.who }}; fi",
        "python train.py {% if params.who %}--name {{ params.who }}{% else %}--none{% endif %}",
        "python train.py {% for part in params.parts %}--part {{ part }} {% endfor %} --end",
        "python train.py --name {{ params.who }} # as the form says",
        "echo {% raw %}{{ is no template{% endraw %} {{ params.who }}",
        "sh run.sh {{ params.who }}",
        "python -c 'import sys' {{ params.who }}",
        "python -m pkg.train --who {{ params.who }}",
        "python -W ignore -X dev -Bu train.py {{ params.who }}",
        "python -Wignore -um pkg.train {{ params.who }}",
        "python ${CODE_DIR}/train.py {{ params.who }}",
        "sh -e run.sh {{ params.who }}",
        "bash -euo pipefail -c 'python train.py $0' {{ params.who }}",
        "./scripts/run {{ params.who }} && scripts/run.sh {{ params.who }}",
        "cd {{ params.who }} && mkdir -p out && python train.py",
        "export WHO={{ params.who }}; python train.py",
        "PYTHONHASHSEED={{ params.who }} python train.py",
        "timeout --signal=KILL 60 python train.py {{ params.who }}",
        "keras-tune --rate={{ params.who }} --out=a{{ ds }}/{{ params.who }}",
        "case {{ params.who }} in a) python a.py;; *) python b.py {{ params.who }};; esac",
        "python train.py --name={{ params.who }} | tee log.txt",
        "cat rows.txt | python train.py {{ params.who }} | tee {{ params.who }}",
        "python train.py {{ params.who }} && python - <<END\nprint(1)\nEND",
        "{% if params.who == 'a' %}python{% else %}sh -e{% endif %} run.sh {{ params.who }}",
    ],
)
def test_where_a_value_may_stand(command):
    assert refusals(command) == []


@pytest.mark.parametrize(
    ("command", "why"),
    [
        ('python train.py --name "{{ params.who }}"', "inside quotes"),
        ("python train.py --name '{{ params.who }}'", "inside quotes"),
        ("python train.py --name 'a'\"b {{ params.who }}\"", "inside quotes"),
        ("python train.py {% if ds %}'{% endif %} {{ params.who }}", "inside quotes"),
        ("python train.py {% for p in ds %}'{{ p }}{% endfor %}", "inside quotes"),
        ("python train.py `echo {{ params.who }}`", "in or after"),
        ("python train.py $(echo {{ params.who }})", "in or after"),
        ('python train.py "$(echo a)" {{ params.who }}', "in or after"),
        ("python train.py ${X:-{{ params.who }}}", "in or after"),
        ("python train.py $'x' {{ params.who }}", "in or after"),
        ("python train.py << END {{ params.who }}", "in or after"),
        ("eval python train.py {{ params.who }}", "in or after"),
        ("python train.py \\{{ params.who }}", "backslash"),
        ("python train.py ${{ params.who }}", "right after $"),
        ("python train.py $HOME{{ params.who }}", "right after $"),
        ("python train.py ~{{ params.who }}", "right after $"),
        ("python train.py # {{ params.who }}", "in a comment"),
        ("python train.py {{ params.who }}>log", "right before"),
        ("{{ params.who }} train.py", "where the command is named"),
        ("A=b {{ params.who }} train.py", "where the command is named"),
        ("{{ params.who }}=b python train.py", "where the command is named"),
        ("nice -n 10 {{ params.who }}", "where the command is named"),
        ("python train.py | {{ params.who }}", "where the command is named"),
        ("test x && {{ params.who }}", "where the command is named"),
        ("> out {{ params.who }}", "where the command is named"),
        ("python {{ params.who }}", "the script or the program"),
        ("python -u {{ params.who }} x", "the script or the program"),
        ("bash -c {{ params.who }}", "the script or the program"),
        ("/bin/sh -ec {{ params.who }}", "the script or the program"),
        ("python -c{{ params.who }}", "the script or the program"),
        ("python -W ignore {{ params.who }}", "the script or the program"),
        ("python -X dev -uW ignore {{ params.who }}", "the script or the program"),
        ("python -m {{ params.who }}", "the script or the program"),
        ("python -um pkg.{{ params.who }}", "the script or the program"),
        ("bash -o pipefail -c {{ params.who }}", "the script or the program"),
        ("bash -c -e {{ params.who }}", "the script or the program"),
        ("bash -euo pipefail {{ params.who }}", "the script or the program"),
        ("python < {{ params.who }}", "the script or the program"),
        ("sh -s < {{ params.who }}", "the script or the program"),
        ("< {{ params.who }} sh", "redirection before the command"),
        ("echo {{ params.who }} | python", "reads from another command"),
        ("cat {{ params.who }} |\n ( sh -s )", "reads from another command"),
        ("echo {{ params.who }} | xargs python", "reads from another command"),
        ("source {{ params.who }} && python train.py", "might run it"),
        (". {{ params.who }}", "where the command is named"),
        ("torchrun {{ params.who }}", "might run it"),
        ("torchrun --nproc-per-node 4 {{ params.who }}", "might run it"),
        ("timeout -s KILL 60 {{ params.who }}", "might run it"),
        ("env -u X {{ params.who }}", "might run it"),
        ("trap {{ params.who }} EXIT && python train.py", "might run it"),
        ("$LAUNCH {{ params.who }}", "might run it"),
        ("\\eval {{ params.who }}", "might run it"),
        ("make LR={{ params.who }}", "might run it"),
        ("python $SCRIPT {{ params.who }}", "might run it"),
        ("python ${SCRIPT} {{ params.who }}", "might run it"),
        ("python -m torch.distributed.run {{ params.who }}", "might run it"),
        ("python -m timeit {{ params.who }}", "might run it"),
        ("python --new-option x {{ params.who }}", "might run it"),
        ("bash --rcfile x {{ params.who }}", "might run it"),
        ("[ -v {{ params.who }} ]", "might run it"),
        ("[[ {{ params.who }} -gt 3 ]] && python train.py", "in or after"),
        ("if [[ 1 -gt {{ params.who }} ]]; then true; fi", "in or after"),
        ("(( 1 + {{ params.who }} ))", "in or after"),
        ("((x={{ params.who }})) && python train.py", "in or after"),
        ("let x={{ params.who }}", "in or after"),
        ("declare -i x; x={{ params.who }}", "in or after"),
        ("PATH={{ params.who }} python train.py", "decides what runs"),
        ("env PYTHONPATH=a:{{ params.who }} python train.py", "decides what runs"),
        ("export LD_PRELOAD={{ params.who }}; python train.py", "decides what runs"),
    ],
)
def test_where_it_may_not(command, why):
    (message,) = refusals(command)
    assert why in message


_PIECES = st.sampled_from(
    [
        *(" ", "'", '"', "\\", "`", "$", "$(", ")", "${", "}", "{", "#", "\n", ";", "&", "|"),
        *("<", ">", "<<", "=", "~", "a", "A=", "2", "$HOME", "${HOME}", "-c", "[", "]", "*", "!"),
        *("{{ ds }}", "{{ ds }}", "{{ ds }}", " {{ ds }} ", "{% if ds %}", "{% endif %}"),
        *("{% else %}", "{% for i in [1, 2] %}", "{% endfor %}", "if ", "then ", "eval ", "exec "),
        *("[[ ", "(( "),
    ]
)
_HOSTILE = [
    *("", "x\npwn\n", "'; pwn; '", "-c", "A=b", "2", "$(pwn)", "`pwn`", "\\", "a b", "}", ")"),
    *("a,pwn", "'", '"', ";pwn", "|pwn", "#", "<<a", "&pwn", "~", "_X", "!pwn", "\n", "\\'; pwn #"),
]
_VALUES = st.one_of(
    st.sampled_from(_HOSTILE),
    st.lists(st.sampled_from(_HOSTILE), min_size=2, max_size=3).map("".join),
    st.text(st.sampled_from("ab '\"\\`$(){}#\n;&|<>=~,-?[]!"), max_size=6),
)
_SHELLS = [path for path in map(shutil.which, ("sh", "bash")) if path is not None]


@pytest.fixture(scope="module")
def show(tmp_path_factory):
    """A folder with a program that prints its words, and one that nobody should start."""
    folder = tmp_path_factory.mktemp("programs")
    words = "#!/bin/sh\nprintf '%s\\0' \"$@\"\nprintf '\\n\\0'\n"
    for name, text in (("show.sh", words), ("pwn", "#!/bin/sh\necho PWNED\n")):
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    (folder / "env").symlink_to(str(shutil.which("env")))
    return folder


def said(show, argv) -> tuple[int, str]:
    """Exit code and output of a command that finds nothing but the two programs."""
    with tempfile.TemporaryDirectory() as folder:
        ran = subprocess.run(
            argv,
            cwd=folder,
            env={"PATH": str(show), "HOME": "/home-of-tests"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=within(60),
        )
    return ran.returncode, ran.stdout.decode("utf-8", "replace")


@pytest.mark.skipif(not _SHELLS, reason="there is no shell")
@settings(
    max_examples=max(100, _COUNT // 3),
    deadline=None,
    derandomize=_SAME,
    suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow],
)
@given(pieces=st.lists(_PIECES, max_size=10), value=_VALUES)
def test_a_value_never_changes_what_shells_read_around_it(show, pieces, value):
    command = "show.sh " + "".join(pieces)
    assume("{{ ds }}" in command and not refusals(command))
    assume(not any(number in command for number in ("$$", "$!")))  # processes' numbers
    # bash reads name=~ in any word as if it were an assignment; no value comes into that.
    assume("=~" not in command.replace(" ", ""))
    # bash drops a backslash at the end of several lines, and keeps that of one.
    assume(not command.endswith("\\"))
    assume(value or not {*"<>"} & {*command})  # a word all the same, but the name of no file
    assume(value or "{% if" not in command)  # another branch is another command
    template = _ENVIRONMENT.from_string(command)
    for shell in _SHELLS:
        plain, given = (said(show, [shell, "-c", template.render(ds=v)]) for v in ("QQ", value))
        assert given == (plain[0], plain[1].replace("QQ", value)), template.render(ds=value)


@pytest.mark.parametrize(
    "command",
    [
        "show.sh --name {{ ds }} ; show.sh 'x y' --n={{ ds }}.txt",
        "A={{ ds }} show.sh {{ ds }}{{ ds }}",
        "show.sh {% for p in [ds, ds] %}--p {{ p }} {% endfor %}",
        'if true; then show.sh -{{ ds }} "a b"; fi',
        "show.sh {{ ds }}",
    ],
)
def test_a_rank_takes_a_value_as_one_word(show, command):
    hostile = "x'; pwn; \" $(pwn) `pwn`\n pwn # {a,b} *"
    assert refusals(command) == []
    plain, given = (
        said(show, command_argv(_ENVIRONMENT.from_string(command).render(ds=value)))
        for value in ("QQ", hostile)
    )
    assert plain[0] == 0 and "QQ" in plain[1]
    assert given == (0, plain[1].replace("QQ", hostile))


@settings(max_examples=_COUNT, deadline=None, derandomize=_SAME)
@given(
    st.lists(
        st.sampled_from([*"{%}()[]'\"\\ \nabc|.~-#$`;<>&=", "{{ ", " }}", "{% if ", "{{ ds }}"]),
        max_size=60,
    ).map("".join),
    st.integers(1, 200),
)
def test_reading_takes_bounded_time_and_raises_nothing(text, times):
    began = time.process_time()
    list(command_findings("command", [text * times]))
    assert time.process_time() - began < within(5)

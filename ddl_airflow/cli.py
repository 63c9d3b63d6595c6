"""``ddl-airflow``: look at manifests and lineage without Airflow, and see the product work."""

from __future__ import annotations

import argparse
import dataclasses
import getpass
import importlib.util
import itertools
import json
import os
import re
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast
from urllib.parse import unquote, urlsplit

from ddl_airflow import __version__
from ddl_airflow.core.command import command_finding
from ddl_airflow.core.compute import Compute
from ddl_airflow.core.errors import (
    ConnectionInvalid,
    DdlError,
    ManifestError,
    ManifestIssue,
    NoSuchModel,
    SourceMissing,
)
from ddl_airflow.core.layout import CACHE, experiments
from ddl_airflow.core.manifest import Manifest, load_manifest, manifests_in, shared_dag_id
from ddl_airflow.core.manifest.convert import converted
from ddl_airflow.core.manifest.schema import json_schema
from ddl_airflow.core.manifest.sections.stores import kind_of_uri, store_kinds
from ddl_airflow.core.manifest.site import compute_table
from ddl_airflow.core.output import ended_by_its_reader
from ddl_airflow.core.plan import StoreReference, plan
from ddl_airflow.core.scripts import CURE, will_train_apart
from ddl_airflow.lineage.production import (
    LATEST,
    PRODUCTION,
    dags_in,
    promote,
    read_pointer,
    rollback,
)
from ddl_airflow.lineage.record import LINEAGE, check_files
from ddl_airflow.lineage.retention import clean_results
from ddl_airflow.storage.cache import Cache
from ddl_airflow.storage.cleaning import Removed, clean_workspace, rules
from ddl_airflow.storage.store import SUCCESS, ObjectStore
from ddl_airflow.storage.stores import open_by_environment
from ddl_airflow.storage.transfer import publications

# Trainings in one message.
_MOST_NAMED = 10


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command. Returns 0, 1 for what it found wrong, 2 for how it was called."""
    return ended_by_its_reader(lambda: _called(argv))


def _called(argv: Sequence[str] | None) -> int:
    options = _parser().parse_args(argv)
    try:
        return int(options.run(options))
    except DdlError as error:
        print(f"ddl-airflow: {error}", file=sys.stderr)
        return 1
    except BrokenPipeError:
        raise
    except OSError as error:
        place = f"{error.filename}: " if error.filename else ""
        print(f"ddl-airflow: {place}{error.strerror or error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 128 + signal.SIGINT


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="ddl-airflow", description=__doc__)
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    validate = commands.add_parser(
        "validate",
        help="say everything that is wrong in manifests",
        epilog="Ends with 0 when all are good, 1 when one is not, 2 when there is none to look at.",
    )
    validate.add_argument(
        "manifest", nargs="+", type=Path, help="a file, or a folder with all that are below it"
    )
    validate.add_argument(
        "--format",
        choices=_REPORTS,
        default="text",
        help="text for people, json for programs, github for its annotations (default: text)",
    )
    validate.add_argument("--strict", action="store_true", help="count a warning as an error")
    _takes_compute(validate)
    validate.set_defaults(run=_validate)

    schema = commands.add_parser("schema", help="print the JSON Schema of manifests, for editors")
    schema.set_defaults(run=_schema)

    show = commands.add_parser("plan", help="print the steps that a manifest becomes, as JSON")
    show.add_argument("manifest", type=Path)
    _takes_compute(show)
    show.set_defaults(run=_plan)

    convert = commands.add_parser(
        "convert",
        help="print a manifest, FfDL's too, in the current dialect, with comments and no keys",
    )
    convert.add_argument("manifest", type=Path)
    _takes_compute(convert)
    convert.set_defaults(run=_convert)

    lineage = commands.add_parser(
        "lineage",
        help="print which data, code, manifest and run made a model, and check its files",
        epilog="s3:// uses the usual AWS_* variables, AWS_ENDPOINT_URL among them.",
    )
    lineage.add_argument("uri", help="s3://bucket/training_id, or the folder")
    lineage.set_defaults(run=_lineage)

    tensorboard = commands.add_parser(
        "tensorboard", help="show the curves of all experiments in a workspace"
    )
    _takes_workspace(tensorboard)
    tensorboard.add_argument("--host", default="localhost", help="default: localhost")
    tensorboard.add_argument("--port", type=int, default=6006, help="default: 6006")
    tensorboard.set_defaults(run=_tensorboard)

    doctor = commands.add_parser(
        "doctor",
        help="look whether this host can run trainings, and which boundaries hold on it",
        epilog="Ends with 1 if trainings cannot run or a setting cannot be used; with --strict "
        "also if a boundary is open, or something is at risk. "
        "Run it where Airflow's tasks run, with their environment.",
    )
    doctor.add_argument(
        "--strict", action="store_true", help="an open boundary, or a risk, is a failure"
    )
    doctor.set_defaults(run=_doctor)

    verify = commands.add_parser(
        "verify-cache",
        help="read all staged data in a workspace's cache, and remove what was changed or damaged",
        epilog="Ends with 1 if there was any. What is removed is fetched again when it is needed.",
    )
    _takes_workspace(verify)
    verify.set_defaults(run=_verify_cache)

    production = commands.add_parser(
        "production",
        help="print which training of a DAG is in production, and those before",
        epilog="s3:// as for lineage.",
    )
    production.add_argument(
        "uri", help="s3://bucket/dag_id, or the folder: the results and the DAG"
    )
    production.set_defaults(run=_production)

    back = commands.add_parser(
        "rollback",
        help="put the training before into production again",
        epilog="s3:// as for lineage.",
    )
    back.add_argument("uri", help="s3://bucket/dag_id, or the folder: the results and the DAG")
    back.add_argument("--to", default="", metavar="TRAINING", help="one that was there before")
    back.add_argument("--reason", default="", help="why, for the history")
    back.set_defaults(run=_rollback)

    choose = commands.add_parser(
        "promote",
        help="put a published training into production, whatever is there now",
        epilog="s3:// as for lineage.",
    )
    choose.add_argument("uri", help="s3://bucket/dag_id, or the folder: the results and the DAG")
    choose.add_argument(
        "--to", required=True, metavar="TRAINING", help="its id, or its place in the results"
    )
    choose.add_argument("--reason", default="", help="why, for the history")
    choose.set_defaults(run=_promote)

    clean = commands.add_parser(
        "clean",
        help="remove old runs, and what nobody uses of the cache and of published trainings",
        epilog="Durations as 30d, sizes as 500Gi. Airflow is not asked which runs are open, "
        "but by clean_dag: choose --keep-runs longer than a run may wait. s3:// as for lineage.",
    )
    clean.add_argument("--dry-run", action="store_true", help="only say what would be removed")
    clean.add_argument(
        "--workspace",
        type=Path,
        default=os.environ.get("AIRFLOW__DDL__WORKSPACE"),
        help="the folder of [ddl] workspace; default: $AIRFLOW__DDL__WORKSPACE",
    )
    for name, kept in (
        ("keep-runs", "how long a run's folder stays after the last change in it"),
        ("keep-experiments", "the same for experiments with a name"),
        ("cache-size", "how much stays of the cache"),
    ):
        variable = f"AIRFLOW__DDL__{name.replace('-', '_').upper()}"
        clean.add_argument(
            f"--{name}",
            default=os.environ.get(variable, ""),
            metavar="SIZE" if name == "cache-size" else "TIME",
            help=f"{kept}; default: ${variable}, else all stays",
        )
    clean.add_argument(
        "--results",
        action="append",
        default=[],
        metavar="URI",
        help="a place of results, s3://bucket or a folder, of all DAGs that publish there; may be "
        "given again",
    )
    clean.set_defaults(run=_clean)

    demo = commands.add_parser("demo", help="train the examples through a real Airflow")
    demo.add_argument("--dags", type=Path, default=Path("dags"))
    demo.add_argument("--home", type=Path, default=Path(".demo"), help="default: .demo")
    demo.add_argument(
        "--port", type=_port, help="for the UI; by default 8080, or the next one that is free"
    )
    demo.add_argument("--keep", action="store_true", help="leave the UI running until Ctrl-C")
    demo.set_defaults(run=_demo)
    return parser


def _takes_compute(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--compute",
        default=os.environ.get("AIRFLOW__DDL__COMPUTE", ""),
        metavar="FILE",
        help="the site's kinds of node, as [ddl] compute; default: $AIRFLOW__DDL__COMPUTE",
    )


def _takes_workspace(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--workspace",
        type=Path,
        default=os.environ.get("AIRFLOW__DDL__WORKSPACE"),
        help="the folder of [ddl] workspace; default: $AIRFLOW__DDL__WORKSPACE",
    )


def _validate(options: argparse.Namespace) -> int:
    files = list(_files(options.manifest))
    if not files:
        folders = ", ".join(map(str, options.manifest))
        print(f"ddl-airflow: there is no manifest below {folders}", file=sys.stderr)
        return 2
    compute = compute_table(options.compute)
    looks = [_look(path, compute) for path in files]
    _find_shared_ids(looks)
    if options.strict:
        for look in looks:
            look.errors, look.warnings = [*look.errors, *look.warnings], []
    _REPORTS[options.format](looks)
    return 1 if any(look.errors for look in looks) else 0


@dataclasses.dataclass
class _Look:
    """A look at one file; manifest is None if it is none."""

    file: str
    manifest: Manifest | None
    errors: list[ManifestIssue]
    warnings: list[ManifestIssue]


def _files(paths: Sequence[Path]) -> Iterator[Path]:
    for path in paths:
        if path.is_dir():
            yield from (found for found, _ in manifests_in(path))
        else:
            yield path


def _look(path: Path, compute: Mapping[str, Compute]) -> _Look:
    try:
        manifest = load_manifest(path, compute=compute)
    except ManifestError as error:
        return _Look(str(path), None, list(error.issues), [])
    return _Look(
        str(path), manifest, list(_in_commands(manifest)), [*manifest.warnings, *_apart(manifest)]
    )


def _in_commands(manifest: Manifest) -> Iterator[ManifestIssue]:
    """What stage-data would say of the commands; a syntax error where the ranks' Python is this."""
    code = (manifest.folder or Path()) / manifest.code
    if not code.is_dir():
        fix = "Create it, or correct the path."
        yield ManifestIssue(manifest.line_of("code"), "code", f"{code} is no folder", fix)
        return
    site = os.environ.get("AIRFLOW__DDL__PYTHON", "")
    python = manifest.launcher.python or site or sys.executable
    first, *others = manifest.commands
    at = "model_definition.execution.command"
    commands = [(at, first, manifest.world_size), *((at, one, 0) for one in others)]
    if manifest.evaluation is not None and manifest.evaluation.command:
        commands.append(("evaluation.command", manifest.evaluation.command, 0))
    for field, command, ranks in commands:
        if (found := command_finding(field, command, code, python, ranks)) is not None:
            yield ManifestIssue(manifest.line_of(field), field, found.message, found.fix)


def _apart(manifest: Manifest) -> Iterator[ManifestIssue]:
    if manifest.folder is None:
        return
    code = manifest.folder / manifest.code
    if said := will_train_apart(code, manifest.distribution, manifest.world_size):
        field = "model_definition.execution"
        yield ManifestIssue(manifest.line_of(field), field, said, CURE)


def _find_shared_ids(looks: Sequence[_Look]) -> None:
    claims: dict[str, list[_Look]] = {}
    for look in looks:
        if look.manifest is not None:
            claims.setdefault(look.manifest.dag_id, []).append(look)
    for sharing in claims.values():
        for look in sharing:
            if others := [other.file for other in sharing if other.file != look.file]:
                look.errors.append(shared_dag_id(cast(Manifest, look.manifest), others))


def _report_text(looks: Sequence[_Look]) -> None:
    for look in looks:
        for issue in look.errors:
            print(issue.render(look.file), file=sys.stderr)
        for issue in look.warnings:
            print(f"warning: {issue.render(look.file)}", file=sys.stderr)
        if look.manifest is not None and not look.errors:
            print(
                f"{look.file}: good: DAG {look.manifest.dag_id}, {look.manifest.world_size} ranks, "
                f"{len(look.manifest.commands)} command(s)"
            )


def _report_json(looks: Sequence[_Look]) -> None:
    def entry(look: _Look) -> dict[str, Any]:
        good = look.manifest is not None and not look.errors
        return {
            "file": look.file,
            "good": good,
            "dag_id": look.manifest.dag_id if look.manifest else None,
            "errors": [dataclasses.asdict(issue) for issue in look.errors],
            "warnings": [dataclasses.asdict(issue) for issue in look.warnings],
        }

    print(json.dumps({"manifests": [entry(look) for look in looks]}, indent=2))


def _report_github(looks: Sequence[_Look]) -> None:
    """Workflow commands: GitHub shows each at its line of the change."""

    def escaped(text: str, *more: str) -> str:
        for char in ("%", "\r", "\n", *more):
            text = text.replace(char, f"%{ord(char):02X}")
        return text

    for look in looks:
        for kind, issues in (("error", look.errors), ("warning", look.warnings)):
            for issue in issues:
                place = f"file={escaped(look.file, ':', ',')},line={issue.line or 1}"
                said = f"{issue.field}: " if issue.field else ""
                print(f"::{kind} {place}::{escaped(f'{said}{issue.message}. {issue.fix}')}")


_REPORTS = {"text": _report_text, "json": _report_json, "github": _report_github}


def _schema(options: argparse.Namespace) -> int:
    print(json.dumps(json_schema(), indent=2))
    return 0


def _plan(options: argparse.Namespace) -> int:
    manifest = load_manifest(options.manifest, compute=compute_table(options.compute))
    print(json.dumps(_plain(plan(manifest, options.manifest)), indent=2))
    return 0


def _convert(options: argparse.Namespace) -> int:
    manifest = load_manifest(options.manifest, compute=compute_table(options.compute))
    print(converted(manifest), end="")
    return 0


def _plain(value: Any) -> Any:
    if isinstance(value, StoreReference):
        return value.view()
    if dataclasses.is_dataclass(value):
        return {f.name: _plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {name: _plain(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return str(value) if isinstance(value, Path) else value


def _lineage(options: argparse.Namespace) -> int:
    store = _publication(
        options.uri.rstrip("/").removesuffix(f"/{LINEAGE}").removesuffix("/model").rstrip("/")
    )
    try:
        record = json.loads(store.read_bytes(LINEAGE))
        files = [file["key"] for file in record["result"]["files"]]
    except (ValueError, LookupError, TypeError) as error:
        raise DdlError(
            f"{store.uri}/{LINEAGE} is no lineage: it is damaged, or another file of that name"
            f" ({type(error).__name__}: {error})."
        ) from error
    print(json.dumps(record, indent=2))
    for metric, word in record["result"].get("not_finite", {}).items():
        print(f"warning: {metric!r} was {word} at the end of the training", file=sys.stderr)
    problems = check_files(record, store)
    for problem in problems:
        print(f"ddl-airflow: {problem}", file=sys.stderr)
    if not problems:
        print(f"{len(files)} files are as recorded", file=sys.stderr)
    return 1 if problems else 0


def _publication(uri: str) -> ObjectStore:
    """Where a training's lineage is: at the place itself, or in its newest publication.

    Raises:
        NoSuchModel: it is the place of a DAG, or of several trainings; the message names them.
    """
    store = _open(uri)
    if store.exists(LINEAGE):
        return store
    if there := publications(store):
        return store.at(next(iter(there)))
    listed = list(store.list())
    pointers = {f"{name}.json": name for name in (LATEST, PRODUCTION)}
    results, _, dag_id = uri.rpartition("/")
    found = [name for key, name in pointers.items() if any(one.key == key for one in listed)]
    if found and not results.endswith(":/"):
        named = []
        for name in found:
            pointer = read_pointer(_open(results), dag_id, name)
            if pointer is not None:
                named.append(f"{results}/{pointer['publication']} ({name})")
        raise NoSuchModel(f"{uri} is of a DAG. Name one of its trainings: {', '.join(named)}")
    marked = sorted(
        (one for one in listed if re.fullmatch(rf"[^/]+/[^/]+/{SUCCESS}", one.key)),
        key=lambda one: one.modified,
        reverse=True,
    )
    trainings = list(dict.fromkeys(one.key.partition("/")[0] for one in marked))
    if trainings:
        more = f" and {len(trainings) - _MOST_NAMED} more" * (len(trainings) > _MOST_NAMED)
        raise NoSuchModel(
            f"{uri} is of several trainings. Name one, as {uri}/{trainings[0]}; there is, the "
            f"newest first: {', '.join(trainings[:_MOST_NAMED])}{more}"
        )
    raise NoSuchModel(f"{uri}: nothing was published there: it has no {LINEAGE}")


def _production(options: argparse.Namespace) -> int:
    store, dag_id = _results_of(options.uri)
    pointer = read_pointer(store, dag_id, PRODUCTION)
    if pointer is None:
        print(f"ddl-airflow: {options.uri}: nothing is in production", file=sys.stderr)
        return 1
    print(json.dumps(pointer, indent=2))
    return 0


def _rollback(options: argparse.Namespace) -> int:
    store, dag_id = _results_of(options.uri)
    pointer = rollback(store, dag_id, options.to, by=_who(), reason=options.reason)
    print(f"in production again: {pointer['model']}")
    return 0


def _promote(options: argparse.Namespace) -> int:
    store, dag_id = _results_of(options.uri)
    pointer = promote(store, dag_id, options.to, by=_who(), reason=options.reason)
    print(f"in production: {pointer['model']}")
    return 0


def _who() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # as in a container whose user has no name
        return f"user id {os.getuid()}"


def _results_of(uri: str) -> tuple[ObjectStore, str]:
    """Splits the place of a DAG's results.

    Raises:
        NoSuchModel: it is the place of the results of DAGs; the message names them.
    """
    uri = uri.rstrip("/")
    place = _open(uri)
    results, _, dag_id = uri.rpartition("/")
    if not results.endswith(":/"):
        store = _open(results)
        if any(read_pointer(store, dag_id, name) is not None for name in (LATEST, PRODUCTION)):
            return store, dag_id
    below = dags_in(place)
    if below or results.endswith(":/"):
        raise NoSuchModel(
            f"{uri} is no DAG's. Name one, as {uri}/{below[0] if below else '<dag_id>'}; there is: "
            f"{', '.join(below) or 'none'}"
        )
    return store, dag_id


def _open(uri: str, within: Sequence[Path] | None = None) -> ObjectStore:
    scheme, separator, _rest = uri.partition("://")
    kind = kind_of_uri(uri) if separator else None
    if separator and kind is None:
        forms = " or at ".join(kind.form for kind in store_kinds().values() if kind.has_buckets)
        raise ConnectionInvalid(
            f"{uri}: results are at {forms} or in a folder; {scheme}:// is neither"
        )
    if kind is not None and kind.has_buckets:
        return open_by_environment(uri, within)
    folder = Path(unquote(urlsplit(uri).path)) if separator else Path(uri).resolve()
    if not folder.is_dir():
        raise SourceMissing(
            f"{uri}: there is no such folder. Give the one in which results were published, or "
            "s3://bucket/prefix."
        )
    return open_by_environment(folder.as_uri(), within)


def _says_no_workspace(options: argparse.Namespace) -> bool:
    if options.workspace is None:
        print("ddl-airflow: which workspace? Give --workspace DIR.", file=sys.stderr)
    return options.workspace is None


def _says_no_folder(options: argparse.Namespace) -> bool:
    there = Path(options.workspace).is_dir()
    if not there:
        print(f"ddl-airflow: --workspace {options.workspace} is no folder", file=sys.stderr)
    return not there


def _verify_cache(options: argparse.Namespace) -> int:
    if _says_no_workspace(options) or _says_no_folder(options):
        return 2
    removed = 0
    for blob in Cache(Path(options.workspace) / CACHE).verify():
        print(f"removed {blob}: it is not what was fetched")
        removed += 1
    return 1 if removed else 0


def _tensorboard(options: argparse.Namespace) -> int:
    """Becomes TensorBoard. Returns only when that cannot be."""
    if _says_no_workspace(options):
        return 2
    if importlib.util.find_spec("tensorboard") is None:
        said = "TensorBoard is not installed. Run pip install '.[tensorboard]' in the sources"
        print(f"ddl-airflow: {said}", file=sys.stderr)
        return 2
    folder = experiments(Path(options.workspace)).absolute()
    if not folder.is_dir():
        said = f"{folder}: no training has left an experiment there"
        print(f"ddl-airflow: {said}", file=sys.stderr)
        return 1
    # Not its own script, which need not be on PATH.
    argv = [sys.executable, "-m", "tensorboard.main", "--logdir", str(folder)]
    argv += ["--host", options.host, "--port", str(options.port)]
    sys.stdout.flush()
    os.execv(sys.executable, argv)


def _doctor(options: argparse.Namespace) -> int:
    from ddl_airflow.doctor import State, examine  # the one command that needs Airflow's settings

    states = set()
    for found in examine():
        states.add(found.state)
        print(f"{found.state.value:5}  {found.what}: {found.said}")
        if found.fix:
            print(f"       {found.fix}")
    bad = set(State) - {State.OK} if options.strict else {State.WRONG}
    return 1 if states & bad else 0


def _clean(options: argparse.Namespace) -> int:
    if options.workspace is None and not options.results:
        print("ddl-airflow: clean what? Give --workspace DIR, --results URI.", file=sys.stderr)
        return 2
    asked = {
        "--keep-runs": options.keep_runs,
        "--keep-experiments": options.keep_experiments,
        "--cache-size": options.cache_size,
    }
    if options.workspace is None and any(asked.values()):
        first = next(name for name, value in asked.items() if value)
        said = f"{first} is for a workspace: give --workspace DIR"
        print(f"ddl-airflow: {said}", file=sys.stderr)
        return 2
    if options.workspace is not None and _says_no_folder(options):
        return 2
    removed: list[Iterator[Removed]] = []
    if options.workspace is not None:
        kept = rules(options.keep_runs, options.keep_experiments, options.cache_size)
        removed.append(clean_workspace(Path(options.workspace), kept, dry_run=options.dry_run))
    # Nothing elsewhere is removed over a link that somebody puts into the results.
    stores = (_open(uri, within=()) for uri in options.results)
    removed += [clean_results(store, dry_run=options.dry_run) for store in stores]
    count, nbytes = 0, 0
    for one in itertools.chain.from_iterable(removed):
        print(one)
        count, nbytes = count + 1, nbytes + one.nbytes
    would = "would remove" if options.dry_run else "removed"
    print(f"{would} {count}, {nbytes / 2**20:,.1f} MiB", file=sys.stderr)
    return 0


def _port(text: str) -> int:
    if text.isdecimal() and 0 < int(text) < 2**16:
        return int(text)
    raise argparse.ArgumentTypeError(f"{text!r} is no port: a number from 1 to 65535")


def _demo(options: argparse.Namespace) -> int:
    # Its imports take two seconds, of which Ctrl-C would show a traceback.
    before = signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        from ddl_airflow.demo.show import demo
    except ImportError as error:
        said = f"{error}. Run pip install '.[demo]' in the sources"
        print(f"ddl-airflow: {said}", file=sys.stderr)
        return 2
    finally:
        signal.signal(signal.SIGINT, before)
    if not options.dags.is_dir():
        print(f"ddl-airflow: {options.dags} is no folder. Give --dags.", file=sys.stderr)
        return 2
    if options.home.exists() and not options.home.is_dir():
        said = f"{options.home} is no folder. Give another with --home."
        print(f"ddl-airflow: {said}", file=sys.stderr)
        return 2
    return demo(
        options.home.resolve(), options.dags.resolve(), keep=options.keep, port=options.port
    )


if __name__ == "__main__":
    sys.exit(main())

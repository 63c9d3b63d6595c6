"""``ddl-airflow``: look at manifests and lineage without Airflow, and see the product work."""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ddl_airflow import __version__
from ddl_airflow.core.errors import DdlError, ManifestError
from ddl_airflow.core.layout import experiments
from ddl_airflow.core.manifest import converted, load_manifest
from ddl_airflow.core.plan import StoreReference, plan
from ddl_airflow.lineage.record import LINEAGE, check_files
from ddl_airflow.storage.s3 import s3_client
from ddl_airflow.storage.store import ObjectStore, open_store


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command. Returns 0, 1 for what it found wrong, 2 for how it was called."""
    options = _parser().parse_args(argv)
    try:
        return int(options.run(options))
    except DdlError as error:
        print(f"ddl-airflow: {error}", file=sys.stderr)
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="ddl-airflow", description=__doc__)
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    validate = commands.add_parser("validate", help="say everything that is wrong in manifests")
    validate.add_argument("manifest", nargs="+", type=Path)
    validate.set_defaults(run=_validate)

    show = commands.add_parser("plan", help="print the steps that a manifest becomes, as JSON")
    show.add_argument("manifest", type=Path)
    show.set_defaults(run=_plan)

    convert = commands.add_parser(
        "convert",
        help="print a manifest, FfDL's too, in the current dialect, with comments and no keys",
    )
    convert.add_argument("manifest", type=Path)
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
    tensorboard.add_argument(
        "--workspace",
        type=Path,
        default=os.environ.get("AIRFLOW__DDL__WORKSPACE"),
        help="the folder of [ddl] workspace; default: $AIRFLOW__DDL__WORKSPACE",
    )
    tensorboard.add_argument("--host", default="localhost", help="default: localhost")
    tensorboard.add_argument("--port", type=int, default=6006, help="default: 6006")
    tensorboard.set_defaults(run=_tensorboard)

    demo = commands.add_parser("demo", help="train the examples through a real Airflow")
    demo.add_argument("--dags", type=Path, default=Path("dags"))
    demo.add_argument("--home", type=Path, default=Path(".demo"), help="default: .demo")
    demo.add_argument("--port", type=int, default=8080, help="for the UI, or the next free one")
    demo.add_argument("--keep", action="store_true", help="leave the UI running until Ctrl-C")
    demo.set_defaults(run=_demo)
    return parser


def _validate(options: argparse.Namespace) -> int:
    wrong = 0
    for path in options.manifest:
        try:
            manifest = load_manifest(path)
        except ManifestError as error:
            wrong += 1
            print(error, file=sys.stderr)
            continue
        for issue in manifest.warnings:
            print(f"warning: {issue.render(str(path))}", file=sys.stderr)
        print(
            f"{path}: good: DAG {manifest.dag_id}, {manifest.world_size} ranks, "
            f"{len(manifest.commands)} command(s)"
        )
    return 1 if wrong else 0


def _plan(options: argparse.Namespace) -> int:
    print(json.dumps(_plain(plan(load_manifest(options.manifest), options.manifest)), indent=2))
    return 0


def _convert(options: argparse.Namespace) -> int:
    print(converted(load_manifest(options.manifest)), end="")
    return 0


def _plain(value: Any) -> Any:
    if isinstance(value, StoreReference):
        return value.view()
    if dataclasses.is_dataclass(value):
        return {f.name: _plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return str(value) if isinstance(value, Path) else value


def _lineage(options: argparse.Namespace) -> int:
    store = _open(options.uri.removesuffix("/").removesuffix(f"/{LINEAGE}").removesuffix("/model"))
    record = json.loads(store.read_bytes(LINEAGE))
    print(json.dumps(record, indent=2))
    problems = check_files(record, store)
    for problem in problems:
        print(f"ddl-airflow: {problem}", file=sys.stderr)
    if not problems:
        print(f"{len(record['result']['files'])} files are as recorded", file=sys.stderr)
    return 1 if problems else 0


def _open(uri: str) -> ObjectStore:
    scheme, _, _rest = uri.partition("://")
    if scheme == "s3":
        # Endpoint and keys as every AWS tool finds them.
        return open_store(uri, s3_client(os.environ.get("AWS_ENDPOINT_URL"), None, None))
    return open_store(uri if scheme == "file" else Path(uri).resolve().as_uri())


def _tensorboard(options: argparse.Namespace) -> int:
    """Becomes TensorBoard. Returns only when that cannot be."""
    if options.workspace is None:
        print("ddl-airflow: which workspace? Give --workspace DIR.", file=sys.stderr)
        return 2
    if importlib.util.find_spec("tensorboard") is None:
        said = "TensorBoard is not installed. Run: pip install 'ddl-airflow[tensorboard]'"
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


def _demo(options: argparse.Namespace) -> int:
    try:
        from ddl_airflow.demo.show import demo
    except ImportError as error:
        print(f"ddl-airflow: {error}. Run: pip install 'ddl-airflow[demo]'", file=sys.stderr)
        return 2
    if not options.dags.is_dir():
        print(f"ddl-airflow: {options.dags} is no folder. Give --dags.", file=sys.stderr)
        return 2
    return demo(
        options.home.resolve(), options.dags.resolve(), keep=options.keep, port=options.port
    )


if __name__ == "__main__":
    sys.exit(main())

"""What of an FfDL manifest is refused, and what is set aside with a warning."""

from __future__ import annotations

import re

from ddl_airflow.core.manifest.document import child
from ddl_airflow.core.manifest.ffdl.model import (
    CONNECTION,
    DEFAULT_RESULTS,
    HOST_MOUNT,
    IMAGE,
    OBJECT_STORES,
    PROGRESS,
    SWIFT,
    DataStore,
    EvaluationMetrics,
    Group,
    ImageLocation,
)
from ddl_airflow.core.manifest.rule import Finding, Findings, Rule, registering
from ddl_airflow.core.manifest.sections.definition import (
    FINDS_SERVERS,
    FRAMEWORKS_ELSEWHERE,
    split_commands,
)
from ddl_airflow.core.manifest.templates import is_template
from ddl_airflow.core.manifest.values import regex as compiled

RULES: list[Rule] = []
_rule = registering(RULES)

_ELSEWHERE = {
    "custom": "Install what the image has beside TensorFlow, and write name: tensorflow.",
}


def in_one_line(command: str) -> str:
    """Returns a command as FfDL ran it: it put a space in place of each line's end.

    Source: github.com/IBM/FfDL, trainer/trainer/trainer_impl.go, TRAINING_COMMAND.
    """
    return re.sub(r"\\?\r?\n", " ", command)


def has_commands(command: str) -> int:
    """Returns how many commands ``;`` separates; 1 if quotes do not close: another rule says so."""
    try:
        return len(split_commands(in_one_line(command)))
    except ValueError:
        return 1


@_rule("framework.name")
def framework_is_tensorflow(at: str, name: str) -> Findings:
    if name not in ("tensorflow", "tensorflow-ddl", "horovod"):
        usual = f"is {name[:40]!r}, and what trains here is TensorFlow"
        fix = _ELSEWHERE.get(name, "Write name: tensorflow, with a script for it.")
        yield Finding(at, *FRAMEWORKS_ELSEWHERE.get(name, (usual, fix)))


@_rule("framework.command")
def commands_have_no_template(at: str, command: str) -> Findings:
    count = has_commands(command)
    if count > 1 and is_template(command):
        message = f"has {count} commands and a template; they run in a shell, as one word of it"
        yield Finding(at, message, "Join them with &&, or have the script read PARAM_<NAME>.")


@_rule("data_stores")
def one_store(at: str, stores: tuple[DataStore, ...]) -> Findings:
    for i in range(1, len(stores)):
        fix = "Delete it; if it is the one for the results, use training_results_reference."
        yield Finding(child(at, i), "is one store too many; FfDL, too, reads only the first", fix)


@_rule("data_stores")
def store_is_reachable(at: str, stores: tuple[DataStore, ...]) -> Findings:
    store, at = stores[0], child(at, 0)
    given = {name for name, value in store.connection if value is not None} - {"type"}
    kind, connection = store.connection.type, f"{at}.connection"
    if store.type == "swift_datastore":
        fix = "Copy the data into an S3 bucket, and use type: mount_cos."
        yield Finding(f"{at}.type", "is swift_datastore, and Swift cannot be reached", fix)
        return
    if store.type == "mount_volume":
        wrong, why = given - {*HOST_MOUNT}, "is not for type mount_volume"
        kinds: tuple[str, ...] = ("host_mount",)
        if not (store.connection.path or "").startswith("/"):
            message = "is not absolute" if store.connection.path else "is missing"
            yield Finding(f"{connection}.path", message, "Write the host's folder: /srv/data.")
    else:
        wrong, why, kinds = (
            given - {*CONNECTION.values()},
            "is not for object stores",
            OBJECT_STORES,
        )
    for name in sorted(wrong):
        reason = "is Swift's, which cannot be reached" if name in SWIFT else why
        yield Finding(f"{connection}.{name}", reason, "Delete it.")
    if kind is not None and kind not in kinds:
        fix = "Delete it: the store's type decides."
        yield Finding(f"{connection}.type", f"is {kind}, but the store is {store.type}", fix)


@_rule("evaluation_metrics")
def metrics_can_be_read(at: str, metrics: EvaluationMetrics | None) -> Findings:
    if metrics is None or metrics.type not in ("regex_extractor", "regex"):
        return
    if not metrics.groups:
        yield Finding(f"{at}.groups", "is missing, a regex needs it", "Add groups, or delete all.")
    for name, group in metrics.groups.items():
        yield from group_findings(f"{child(f'{at}.groups', name)}", group)


def group_findings(at: str, group: Group) -> Findings:
    where, regex = f"{at}.regex", group.regex
    if found := re.search(r"%\{\w+(:\w+)?\}", regex):
        fix = "Write the expression itself, such as (?P<loss>[0-9.]+)."
        yield Finding(where, f"uses FfDL's pattern {found[0][:40]}, which is not here", fix)
        return
    if "\n" in regex or re.search(r"(?<!\\)(\\\\)*\\n", regex):
        fix = "Match one line."
        yield Finding(where, "spans lines, and each line is searched alone", fix)
    if re.search(r"\(\?P=|\(\?\(|(?<!\\)(\\\\)*\\[1-9]", regex):
        yield Finding(where, "refers back to a group", "Write out what the group matches.")
    try:
        known = compiled(regex).groupindex
    except ValueError as error:
        yield Finding(where, str(error), "Escape ( [ { + * ? .")
        return
    for section, values in (("scalars", group.scalars), ("etimes", group.etimes)):
        for name, value in values.items():
            if section == "etimes" and name not in PROGRESS:
                continue
            field = child(f"{at}.{section}", name)
            if value.type in ("STRING", "JSONSTRING"):
                yield Finding(f"{field}.type", f"is {value.type}, no number", "Delete the value.")
            elif not value.value.startswith("$"):
                yield Finding(f"{field}.value", "is a constant, nothing to read", "Delete it.")
            elif value.value[1:] not in known:
                fix = "Name a group of the regex, as in (?P<loss>[0-9.]+) and $loss."
                yield Finding(f"{field}.value", "names no group of the regex", fix)


@_rule("version", warning=True)
def version_is_unused(at: str, version: str | None) -> Findings:
    if version is not None:
        yield Finding(at, "is not used, nor was it by FfDL", "Delete it.")


@_rule("gpu_type", warning=True)
def gpu_type_is_not_chosen(at: str, gpu_type: str | None) -> Findings:
    if gpu_type is not None:
        fix = "Delete it; compute_configuration of our dialect names a kind of node of the site."
        yield Finding(at, "is not used: ranks take the GPUs that their host has", fix)


@_rule("cpus", warning=True)
def cpus_are_not_reserved(at: str, cpus: float | None) -> Findings:
    if cpus is not None:
        fix = "Delete it; OMP_NUM_THREADS says otherwise where it has to."
        yield Finding(at, "is not reserved: the ranks of a host share its cores evenly", fix)


@_rule("memory", warning=True)
@_rule("storage", warning=True)
def sizes_are_not_reserved(at: str, size: str | None) -> Findings:
    if size is not None:
        yield Finding(at, "is not reserved: ranks take what their host has", "Delete it.")


@_rule("framework.version", warning=True)
def version_is_an_image(at: str, version: str) -> Findings:
    if re.fullmatch(IMAGE, version):
        fix = 'Write "1.15" if the script is for the 1.x API, else the version: "2.21".'
        yield Finding(at, "is an image's tag; the ranks' own TensorFlow 2 is taken for it", fix)


@_rule("framework.command", warning=True)
def commands_run_in_a_shell(at: str, command: str) -> Findings:
    count = has_commands(command)
    if count > 1:
        message = f"has {count} commands: all run on each rank, and what counts is how the last"
        yield Finding(at, f"{message} ends", "Join them with && to stop at the first that fails.")


@_rule("framework.command", warning=True)
def lines_are_one(at: str, command: str) -> Findings:
    # YAML keeps the breaks of a folded text only before lines that are indented more.
    if re.search(r"\n(?![\s#])", command):
        message = "has several lines, which are one, with spaces between, as FfDL had it"
        yield Finding(at, message, "Separate commands with ; or &&.")


@_rule("learners", "framework.command", warning=True)
def learners_are_found_by_tf_config(at: str, learners: int, command: str) -> Findings:
    if learners > 1 and FINDS_SERVERS.search(command):
        message = "is for parameter servers that find each other by the names of FfDL's pods"
        fix = "Convert it, write distribution: parameter_server, and read TF_CONFIG."
        yield Finding(at, message, fix)


@_rule("framework.image_tag", warning=True)
@_rule("framework.image_location", warning=True)
def image_is_not_started(at: str, image: str | ImageLocation | None) -> Findings:
    if image is not None:
        fix = "Delete it; launcher.python of our dialect names another Python."
        yield Finding(at, "is not used: no container is started", fix)


@_rule("data_stores", warning=True)
def results_have_a_place(at: str, stores: tuple[DataStore, ...]) -> Findings:
    if stores[0].training_results is None:
        where = "folder" if stores[0].type == "mount_volume" else "bucket"
        message = f"is missing: results go to the {where} {DEFAULT_RESULTS} of this store"
        fix = f"Make it, or write training_results: {{container: my-{where}}}."
        yield Finding(f"{child(at, 0)}.training_results", message, fix)


@_rule("data_stores", warning=True)
def volume_name_is_unused(at: str, stores: tuple[DataStore, ...]) -> Findings:
    if stores[0].type == "mount_volume" and stores[0].connection.name is not None:
        field = f"{child(at, 0)}.connection.name"
        yield Finding(field, "is not used: the path says where the volume is", "Delete it.")


@_rule("evaluation_metrics", warning=True)
def metrics_are_read_from_the_output(at: str, metrics: EvaluationMetrics | None) -> Findings:
    if metrics is None:
        return
    output = "is not used: numbers are read from rank 0's output"
    delete = "Delete it."
    if metrics.type in ("tensorboard", "emetrics_file"):
        fix = "Print the numbers and use type: regex_extractor, or call ddl.report."
        yield Finding(f"{at}.type", f"is {metrics.type}, whose files are not read", fix)
    if metrics.image_tag is not None:
        yield Finding(f"{at}.image_tag", "is not used: no container is started", delete)
    if metrics.in_ is not None:
        yield Finding(f"{at}.in", output, delete)
    if metrics.line_lookahead is not None:
        message = "is not used: each line is searched alone"
        yield Finding(f"{at}.line_lookahead", message, delete)
    if metrics.eventTypes:
        yield Finding(f"{at}.eventTypes", output, delete)
    if metrics.type in ("tensorboard", "emetrics_file"):
        if metrics.groups:
            yield Finding(f"{at}.groups", f"is not for type {metrics.type}", delete)
        return
    given: set[str] = set()
    for name, group in metrics.groups.items():
        field = child(f"{at}.groups", name)
        if group.meta is not None:
            message = "is not used: a value has the time at which its line came"
            yield Finding(f"{field}.meta", message, delete)
        for axis in group.etimes:
            progress = PROGRESS.get(axis)
            if progress is None:
                fix = f"Delete it; known: {', '.join(PROGRESS)}."
                yield Finding(child(f"{field}.etimes", axis), "is no time axis here", fix)
            elif progress in given:
                message = f"is not used: {progress} is read in a group above"
                yield Finding(child(f"{field}.etimes", axis), message, delete)
            given.add(progress or "")

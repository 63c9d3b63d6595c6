"""metrics, transform, evaluation and approval: what a training gives, and what it must be worth."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from ddl_airflow.core.manifest.rule import Finding, Findings, Rule, registering
from ddl_airflow.core.manifest.sections.base import Section
from ddl_airflow.core.manifest.sections.definition import command_can_be_split, split_commands
from ddl_airflow.core.manifest.sections.places import leaves_its_folder
from ddl_airflow.core.manifest.templates import command_findings
from ddl_airflow.core.manifest.values import Checkpoint, Duration, Text, number, regex, truth

SAMPLE_ENDINGS = (".npy", ".npz", "-ubyte", "-ubyte.gz")
RULES: list[Rule] = []
_rule = registering(RULES)


class Metric(Section):
    """A number to be read from the output of rank 0."""

    name: Text = Field(
        description="Name of the metric; step, steps and epoch set the progress itself.",
        examples=["loss"],
    )
    regex: Annotated[str, Field(min_length=1)] = Field(
        description="Searched in each line; its one group is the number.",
        examples=["Loss= ([0-9.]+)"],
    )


class Transform(Section):
    """How the checkpoint becomes a SavedModel."""

    checkpoint: Checkpoint = Field(
        default="latest", description="Checkpoint to export: latest, or a step.", examples=[1000]
    )
    inputs: Mapping[str, Text] = Field(
        default={}, description="Name in the signature -> tensor.", examples=[{"images": "x:0"}]
    )
    outputs: Mapping[str, Text] = Field(
        default={}, description="Name in the signature -> tensor.", examples=[{"scores": "y:0"}]
    )
    sample: Text | None = Field(
        default=None,
        description="File in DATA_DIR or RESULT_DIR for the prediction that checks the model.",
        examples=["t10k-images-idx3-ubyte.gz"],
    )


class Evaluation(Section):
    """What a model must be worth to be published."""

    metric: Text = Field(
        description="Name of the number that decides: accuracy of the reloaded model on the "
        "sample's labels, a metric of the training that is not of training batches, or one that "
        "the command writes.",
        examples=["accuracy"],
    )
    source: Literal["sample", "command", "validation", "script", "output", "training"] | None = (
        Field(
            default=None,
            description="What it must be measured on, or by: the sample, the command, Keras's "
            "validation data, the script (ddl.report), its output (metrics:), or training batches. "
            "By default whichever was last, but not training batches.",
            examples=["validation"],
        )
    )
    minimum: Annotated[float, BeforeValidator(number)] | None = Field(
        default=None, description="Below it nothing is published.", examples=[0.95]
    )
    maximum: Annotated[float, BeforeValidator(number)] | None = Field(
        default=None, description="Above it nothing is published.", examples=[0.2]
    )
    not_worse_than_production: Annotated[bool, BeforeValidator(truth)] = Field(
        default=False,
        description="Whether it must be as good as that of the model in production.",
        examples=[True],
    )
    command: Text | None = Field(
        default=None,
        description="Runs once, and writes a JSON object of numbers to $EVALUATION.",
        examples=["python evaluate.py"],
    )


class Approval(Section):
    """Whether a person decides over publishing."""

    required: Annotated[bool, BeforeValidator(truth)] = Field(
        default=True, description="Whether the run waits for a person.", examples=[True]
    )
    timeout: Duration | None = Field(
        default=None,
        description="How long it waits; by default without an end, and the next runs of a schedule "
        "wait with it.",
        examples=["7d"],
    )
    then: Literal["reject", "approve"] = Field(
        default="reject",
        description="What counts as the answer when nobody has given one by then.",
        examples=["reject"],
    )


@_rule("approval")
def approval_has_time(at: str, approval: Approval) -> Findings:
    timeout = approval.timeout
    if timeout is not None and timeout <= timedelta(0):
        yield Finding(f"{at}.timeout", "leaves no time at all", "Write for example 7d.")
    if "then" in approval.model_fields_set and timeout is None:
        fix = "Add timeout: 7d, or delete then."
        yield Finding(f"{at}.then", "is for a wait that has an end", fix)


@_rule("metrics")
def metrics_have_one_group(at: str, metrics: tuple[Metric, ...]) -> Findings:
    fix = "Put ( ) around the number alone; write (?: ) for other groups."
    for i, metric in enumerate(metrics):
        field = f"{at}[{i}].regex"
        if len(metric.regex) > 500:
            yield Finding(field, "is longer than 500 characters", "Match less of the line.")
            continue
        try:
            groups = regex(metric.regex).groups
        except ValueError as error:
            yield Finding(field, str(error), "Escape ( [ { + * ? .")
            continue
        if groups != 1:
            yield Finding(field, f"has {groups} groups, wanted exactly one", fix)


@_rule("metrics")
def metrics_have_unique_names(at: str, metrics: tuple[Metric, ...]) -> Findings:
    first: dict[str, int] = {}
    for i, metric in enumerate(metrics):
        field = f"{at}[{i}].name"
        if metric.name in ("t", "source"):  # keys of every progress record
            yield Finding(field, f"{metric.name} is reserved", "Choose another name.")
        elif first.setdefault(metric.name, i) != i:
            message = f"{metric.name[:40]!r} is also the name of {at}[{first[metric.name]}]"
            yield Finding(field, message, "Choose another name.")


@_rule("model_definition.execution.command", "transform", warning=True)
def transform_is_the_built_in_one(at: str, command: str, transform: Transform) -> Findings:
    try:
        commands = split_commands(command)
    except ValueError:  # said by another rule
        return
    if len(commands) < 2:
        return
    for name in ("checkpoint", "inputs", "outputs"):
        if name in transform.model_fields_set:
            message = "is for the built-in transform, and the command after ; takes its place"
            yield Finding(f"{at}.{name}", message, "Delete it, or that command.")


@_rule("transform.inputs")
def inputs_are_fed_once(at: str, inputs: Mapping[str, str]) -> Findings:
    named: dict[str, str] = {}
    for name, tensor in inputs.items():
        if (first := named.setdefault(tensor.removesuffix(":0"), name)) != name:
            message = f"is {tensor[:40]}, as {first[:40]} is: a model is fed each input once"
            yield Finding(f"{at}.{name}", message, "Leave one of the two.")


@_rule("transform.sample")
def sample_is_a_readable_file(at: str, sample: str | None) -> Findings:
    if sample is None:
        return
    if leaves_its_folder(sample):
        yield Finding(at, "is not a file inside DATA_DIR", "Write its name relative to DATA_DIR.")
    elif not sample.endswith(SAMPLE_ENDINGS):
        fix = f"Use a file that ends in {', '.join(SAMPLE_ENDINGS)}."
        yield Finding(at, f"{sample[:70]!r} has no format that can be read", fix)


@_rule("evaluation")
def evaluation_asks_for_something(at: str, evaluation: Evaluation | None) -> Findings:
    if evaluation is None:
        return
    low, high = evaluation.minimum, evaluation.maximum
    if low is None and high is None and not evaluation.not_worse_than_production:
        fix = "Add minimum: 0.95, maximum: or not_worse_than_production: true."
        yield Finding(at, "asks for nothing", fix)
    if low is not None and high is not None and low > high:
        yield Finding(f"{at}.minimum", f"is above the maximum {high:g}", "Swap them.")


@_rule("metrics", "evaluation")
def evaluation_asks_for_what_can_be_measured(
    at: str, metrics: tuple[Metric, ...], evaluation: Evaluation | None
) -> Findings:
    if evaluation is None:
        return
    source, metric, field = evaluation.source, evaluation.metric, f"{at}.source"
    if source == "command" and not evaluation.command:
        yield Finding(field, "is command, and there is none", "Add command: python evaluate.py.")
    if source == "sample" and metric != "accuracy":
        fix = "Write metric: accuracy, or command: python evaluate.py."
        yield Finding(field, "is sample, which tells the accuracy alone", fix)
    if source == "output" and metric not in (one.name for one in metrics):
        fix = f"Add metrics: with a regex for {metric[:40]}."
        yield Finding(field, f"is output, and metrics: has no {metric[:40]!r}", fix)
    if source == "validation" and not metric.startswith("val_"):
        fix = f"Write metric: val_{metric[:40]}."
        yield Finding(field, "is validation, and those names begin with val_", fix)


@_rule("evaluation")
def command_of_evaluation_can_be_split(at: str, evaluation: Evaluation | None) -> Findings:
    if evaluation is not None and evaluation.command:
        yield from command_can_be_split(f"{at}.command", evaluation.command)


@_rule("evaluation")
def evaluation_has_values_as_words_only(at: str, evaluation: Evaluation | None) -> Findings:
    if evaluation is not None and evaluation.command:
        yield from command_findings(f"{at}.command", [evaluation.command])

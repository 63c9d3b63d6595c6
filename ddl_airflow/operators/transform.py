"""transform: checkpoint and base graph to a SavedModel that has been loaded and asked."""

from __future__ import annotations

import shlex
import shutil
from collections.abc import Mapping, Sequence
from typing import Any

from ddl_airflow.core import errors
from ddl_airflow.core.beneath import read_object
from ddl_airflow.core.command import check_command
from ddl_airflow.core.layout import RunLayout
from ddl_airflow.core.parameters import parameter_environment
from ddl_airflow.lineage.record import forget_parts, has_part, read_part, write_part
from ddl_airflow.operators.base import rank_python
from ddl_airflow.operators.job import JobOperator

_KINDS = {"CheckpointMissing": errors.CheckpointMissing, "ModelRejected": errors.ModelRejected}


class TransformOperator(JobOperator):
    """Runs the manifest's further commands once, or the built-in transform if there are none.

    It runs in a process of its own, in the ranks' Python: Airflow's never imports TensorFlow.

    Args:
        commands: the manifest's commands after the first.
        checkpoint: ``latest`` or a step.
        inputs, outputs: signature name to tensor name; empty to look in the graph.
        sample: file whose rows the reloaded model must predict; empty to look for one.
        python, tf1, parameters, secrets: as ``JobOperator`` has them.
    """

    template_fields = (
        "commands",
        "checkpoint",
        "inputs",
        "outputs",
        "sample",
        "python",
        "tf1",
        "parameters",
        "secrets",
    )
    templated = ("commands",)
    fixed = template_fields
    settable = ("checkpoint",)
    template_fields_renderers = {
        "inputs": "json",
        "outputs": "json",
        "parameters": "json",
        "secrets": "json",
    }
    ui_color = "#e4dcf1"

    def __init__(
        self,
        *,
        commands: Sequence[str] = (),
        checkpoint: str = "latest",
        inputs: Mapping[str, str] | None = None,
        outputs: Mapping[str, str] | None = None,
        sample: str = "",
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.commands = list(commands)
        self.checkpoint = checkpoint
        self.inputs = dict(inputs or {})
        self.outputs = dict(outputs or {})
        self.sample = sample

    def rehearse(self, layout: RunLayout) -> str:
        """The commands, or which checkpoint the built-in transform takes."""
        for command in self.commands:
            check_command(command, layout.code, rank_python(self.python))
        if self.commands:
            return f"would run once each: {' ; '.join(self.commands)}"
        return f"would make a SavedModel of checkpoint {self.checkpoint}"

    def run_step(self, layout: RunLayout, context: Any) -> dict[str, Any]:
        """Returns the model's folder, the checkpoint and the signatures."""
        try_number = context["ti"].try_number
        forget_parts(layout, "transform")  # and what evaluate says of the model before
        if self.commands:
            report = self._own_commands(layout, try_number)
        else:
            report = self._built_in(layout, try_number)
        tries = {"transform": self.tries(context)}
        write_part(layout, "transform", {"result": report, "tries": tries})
        return {"model": str(layout.model)} | {
            name: report[name] for name in ("checkpoint", "checkpoint_step") if name in report
        }

    def _own_commands(self, layout: RunLayout, try_number: int) -> dict[str, Any]:
        if has_part(layout, "train") and not read_part(layout, "train")["result"]["wrote_model"]:
            # Of an earlier try: SavedModelBuilder refuses a folder that is there, and what is found
            # in the end must be what these commands wrote.
            shutil.rmtree(layout.model, ignore_errors=True)
        for number, command in enumerate(self.commands):
            check_command(command, layout.code, rank_python(self.python))
            name = f"transform-{try_number}-{number}"
            self.run_once(
                layout, name, command, layout.logs / "transform", self.environment(layout)
            )
        if not (layout.model / "saved_model.pb").is_file():
            raise errors.TransformError(
                f"the manifest's command {self.commands[-1]!r} ended well, and wrote no "
                f"SavedModel to $RESULT_DIR/model. Write it there, or leave only the training "
                "command in execution.command to have the built-in transform write it."
            )
        report = self._saved_model(layout, try_number, ["--written"])
        return {"transform": self.commands} | report

    def _built_in(self, layout: RunLayout, try_number: int) -> dict[str, Any]:
        words = ["--checkpoint", self.checkpoint]
        if _trained_model(layout):
            words.append("--may-be-written")
        for option, names in (("--input", self.inputs), ("--output", self.outputs)):
            for name, tensor in names.items():
                words += [option, f"{name}={tensor}"]
        report = self._saved_model(layout, try_number, words)
        if "checkpoint" in report:
            origin = f"{report['checkpoint']} (step {report['checkpoint_step']})"
        else:
            origin = "the training itself, which left no checkpoint"
        self.log.info("model from %s, loaded and asked: %s", origin, report.get("prediction"))
        return report

    def _saved_model(self, layout: RunLayout, try_number: int, more: list[str]) -> dict[str, Any]:
        """Runs ``ddl_ops.saved_model`` and returns its report; its error is raised."""
        layout.transform_report.unlink(missing_ok=True)
        words = [
            *("python", "-m", "ddl_ops.saved_model"),
            *("--result-dir", str(layout.result)),
            *("--data-dir", str(layout.staged)),
            *("--export-dir", str(layout.model)),
            *("--report", str(layout.transform_report)),
            *more,
        ]
        if self.sample:
            words += ["--sample", self.sample]
        # Ours is for TensorFlow 2, and is given no secrets.
        env = layout.rank_environment(self.dag_id, trained=True)
        env |= parameter_environment(self.parameters)
        try:
            self.run_once(
                layout,
                f"transform-{try_number}",
                shlex.join(words),
                layout.logs / "transform",
                env,
            )
        except errors.JobFailed as failed:
            try:
                said = read_object(layout.transform_report, layout.workspace)
            except (FileNotFoundError, errors.FileRefused):
                raise failed from None
            if "error" in said:
                kind = _KINDS.get(str(said.get("kind")), errors.TransformError)
                raise kind(str(said["error"])) from failed
            raise
        return _sound(read_object(layout.transform_report, layout.workspace))


def _sound(report: dict[str, Any]) -> dict[str, Any]:
    """Returns the report. Raises TransformError if what is read of it is not what it should be."""
    accuracy = report.get("accuracy")
    number = accuracy is None or type(accuracy) is float or accuracy in (0, 1)
    step = report.get("checkpoint_step")  # None: the checkpoint's name tells none
    known = step is None or type(step) is int
    sample = report.get("sample")
    texts = (report.get("checkpoint", ""), sample or "", report.get("no_accuracy", ""))
    said = all(isinstance(text, str) for text in texts)
    if number and known and said and type(report.get("rows", 0)) is int:
        return report
    raise errors.TransformError(
        "ddl/transform.json: accuracy, sample, rows, checkpoint or checkpoint_step is not what "
        "ddl_ops.saved_model writes there. A command of the training must not write that file."
    )


def _trained_model(layout: RunLayout) -> bool:
    """Whether the training itself wrote a SavedModel where one belongs."""
    if not has_part(layout, "train"):
        return False
    wrote: bool = read_part(layout, "train")["result"]["wrote_model"]
    return wrote and (layout.model / "saved_model.pb").is_file()

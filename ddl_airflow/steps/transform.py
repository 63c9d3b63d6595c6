"""transform: checkpoint and base graph to a SavedModel that has been loaded and asked."""

from __future__ import annotations

import reprlib
import shlex
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from ddl_airflow.core import environment, errors
from ddl_airflow.core.beneath import read_object
from ddl_airflow.core.command import check_command
from ddl_airflow.core.layout import RunLayout
from ddl_airflow.core.manifest.values import without_written_secrets
from ddl_airflow.core.parameters import parameter_environment
from ddl_airflow.core.plan import TransformStep
from ddl_airflow.core.removal import mounted_in, remove_tree
from ddl_airflow.lineage.record import drop_parts, has_part, read_part, write_part
from ddl_airflow.steps.base import ScriptTry

if TYPE_CHECKING:
    from pathlib import Path

_KINDS = {"CheckpointMissing": errors.CheckpointMissing, "ModelRejected": errors.ModelRejected}
# What ddl_ops.saved_model and ddl_ops.serving_trial write into the report.
_REPORTED = (
    *("framework", "tensorflow", "base_graph", "checkpoint", "checkpoint_step", "signatures"),
    *("sample", "rows", "prediction", "labels", "accuracy", "no_accuracy"),
    *("warnings", "files", "seconds"),
)
_LONGEST = 10_000
_MOST_NAMED = 8
_SAVED_MODEL = "saved_model.pb"


def first_row(prediction: Any) -> str:
    """A line of what the model answered, which may be thousands of numbers for each row.

    Args:
        prediction: of each output its rows, as a report has them; any other value is shown as well.
    """
    if isinstance(prediction, dict):
        prediction = {
            name: rows[0] if isinstance(rows, list) and rows else rows
            for name, rows in prediction.items()
        }
    short = reprlib.Repr()
    short.maxlevel, short.maxdict, short.maxlist, short.maxstring = 2, 8, 4, 60
    return short.repr(prediction)


class Transform(ScriptTry[TransformStep]):
    """Runs the manifest's further commands once, or the built-in transform if there are none.

    It runs in a process of its own, in the ranks' Python: this one never imports TensorFlow.
    """

    def rehearse(self) -> str:
        """The commands, or which checkpoint the built-in transform takes."""
        layout = self.layout
        for command in self.step.commands:
            check_command(command, layout.code, self.python)
        if self.step.commands:
            return f"would run once each: {' ; '.join(self.step.commands)}"
        return f"would make a SavedModel of checkpoint {self.step.checkpoint}"

    def run(self) -> dict[str, Any]:
        """Returns the model's folder, the checkpoint and the signatures."""
        layout = self.layout
        drop_parts(layout, "transform")  # and what evaluate says of the model before
        report = self._own_commands() if self.step.commands else self._built_in()
        tries = {"transform": self.context.tries}
        write_part(layout, "transform", {"result": report, "tries": tries})
        return {"model": str(layout.model)} | {
            name: report[name] for name in ("checkpoint", "checkpoint_step") if name in report
        }

    def _own_commands(self) -> dict[str, Any]:
        layout = self.layout
        self._remove_earlier()
        for number, command in enumerate(self.step.commands):
            check_command(command, layout.code, self.python)
            name = f"transform-{self.context.try_number}-{number}"
            self.run_once(name, command, layout.logs / "transform", self.environment())
        if not layout.has_written_model:
            there = sorted(path.name for path in layout.model.glob("*"))[:_MOST_NAMED]
            but = f", but {', '.join(there)}" if there else ""
            raise errors.TransformError(
                f"the manifest's command {self.step.commands[-1]!r} ended well, and wrote no "
                f"SavedModel to $RESULT_DIR/model{but}. Write it there, or leave only the training "
                "command in execution.command to have the built-in transform write it."
            )
        report = self._saved_model(["--written"])
        commands = [without_written_secrets(command) for command in self.step.commands]
        return {"transform": commands} | report

    def _remove_earlier(self) -> None:
        """The model of an earlier try: SavedModelBuilder refuses a folder that is there, and what
        is found in the end must be what these commands wrote.
        """
        layout = self.layout
        if not has_part(layout, "train"):
            return
        trained, model = read_part(layout, "train")["result"], layout.model
        # What was moved from there, or each time that transform is cleared would leave more.
        moved = sorted(model.parent.glob(f"{model.name}.of-training*"))
        if not trained["wrote_model"]:
            self._remove([model, *moved])
        elif trained.get("wrote_saved_model", True):
            return  # what is there may be the training's
        elif moved:  # also by a try that was killed in between
            self._remove([model])
            self._bring_back(moved[0])
        else:  # and what Estimators export, which was not moved yet
            for one in (*model.glob(_SAVED_MODEL), *model.glob(f"*/{_SAVED_MODEL}")):
                self._remove([one.parent if one.parent != model else one])

    def _bring_back(self, moved: Path) -> None:
        """What the training wrote into ``model``."""
        try:
            moved.rename(self.layout.model)
        except PermissionError:  # as ``_remove``
            words = ["mv", "-T", str(moved), str(self.layout.model)]
            name = f"bring-back-{self.context.try_number}"
            try:
                self.run_once(name, shlex.join(words), self.layout.logs / "bring-back", {})
            except errors.JobFailed as failed:
                raise errors.TransformError(
                    f"{moved}, what the training wrote, cannot be moved to "
                    f"{self.layout.model.name}, neither by Airflow's user nor by that of the "
                    f"ranks: it is of user id {moved.lstat().st_uid}, and its folder of user id "
                    f"{moved.parent.stat().st_uid} (mode {moved.parent.stat().st_mode & 0o7777:o})"
                    ". Move it as its owner, and clear transform."
                ) from failed

    def _remove(self, paths: list[Path]) -> None:
        for path in paths:
            if path.is_symlink() or path.is_file():  # which rmtree leaves
                with suppress(PermissionError):
                    path.unlink()
            with suppress(OSError):
                remove_tree(path)
        path = paths[0]
        if point := mounted_in(path):  # which rm would empty
            raise errors.TransformError(
                f"{point} is mounted in {path}, of an earlier try: unmount it, and clear transform."
            )
        if path.exists():  # its script may have closed it to all but the ranks' user
            name = f"remove-{self.context.try_number}"
            words = ["rm", "-rf", str(path)]
            with suppress(errors.JobFailed):
                self.run_once(name, shlex.join(words), self.layout.logs / "remove", {})
        if path.exists():
            raise errors.TransformError(
                f"{path}, of an earlier try, cannot be removed. It is of user id "
                f"{path.stat().st_uid}: remove it as that user, and clear transform."
            )

    def _built_in(self) -> dict[str, Any]:
        layout = self.layout
        words = ["--checkpoint", self.step.checkpoint]
        if _wrote_model(layout):
            words.append("--may-be-written")
        for option, names in (("--input", self.step.inputs), ("--output", self.step.outputs)):
            for name, tensor in names.items():
                words += [option, f"{name}={tensor}"]
        report = self._saved_model(words)
        if "checkpoint" in report:
            origin = f"{report['checkpoint']} (step {report['checkpoint_step']})"
        else:
            origin = "the training itself"
        first = first_row(report.get("prediction"))
        self.log.info("model from %s, loaded and asked; of the first row: %s", origin, first)
        return report

    def _saved_model(self, more: list[str]) -> dict[str, Any]:
        """Runs ``ddl_ops.saved_model`` and returns its report; its error is raised."""
        layout = self.layout
        layout.transform_report.unlink(missing_ok=True)
        words = [
            *("python", "-m", "ddl_ops.saved_model"),
            *("--result-dir", str(layout.result)),
            *("--data-dir", str(layout.staged)),
            *("--export-dir", str(layout.model)),
            *("--report", str(layout.transform_report)),
            *more,
        ]
        if self.step.sample:
            words += ["--sample", self.step.sample]
        # Ours is for TensorFlow 2, and is given no secrets.
        env = environment.of_run(layout, self.context.run.dag_id, trained=True)
        env |= parameter_environment(self.step.parameters)
        try:
            self.run_once(
                f"transform-{self.context.try_number}",
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
                raise kind(str(said["error"])[:_LONGEST]) from failed
            raise
        return _sound(read_object(layout.transform_report, layout.workspace))


def _sound(report: dict[str, Any]) -> dict[str, Any]:
    """What ddl_ops.saved_model says in the report, which a script may have written.

    Raises:
        TransformError: what is read of it is not what it should be.
    """
    accuracy = report.get("accuracy")
    number = accuracy is None or type(accuracy) is float or accuracy in (0, 1)
    step = report.get("checkpoint_step")  # None: the checkpoint's name tells none
    known = step is None or type(step) is int
    sample = report.get("sample")
    texts = (report.get("checkpoint", ""), sample or "", report.get("no_accuracy", ""))
    said = all(isinstance(text, str) for text in texts)
    if number and known and said and type(report.get("rows", 0)) is int:
        told = {name: report[name] for name in _REPORTED if name in report}
        return {n: one[:_LONGEST] if isinstance(one, str) else one for n, one in told.items()}
    raise errors.TransformError(
        "ddl/transform.json: accuracy, sample, rows, checkpoint or checkpoint_step is not what "
        "ddl_ops.saved_model writes there. A command of the training must not write that file."
    )


def _wrote_model(layout: RunLayout) -> bool:
    """Whether the training itself wrote a SavedModel, and not only logs, where one belongs."""
    if not has_part(layout, "train"):
        return False
    result = read_part(layout, "train")["result"]
    return bool(result.get("wrote_saved_model", result["wrote_model"]))

"""What the ranks of a job leave on disk, and what follows from it.

How a job ended is not for mpirun's exit code to say: it may be 0 where a host is gone. Each rank's
record is (``ddl_ops.rank_record``), which a script may write to as well.
"""

from __future__ import annotations

import errno
import math
import os
import re
import signal
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeGuard

from ddl_airflow.core.advice import LESS_MEMORY, advice
from ddl_airflow.core.beneath import look_anew, read_object
from ddl_airflow.core.cluster import Cluster
from ddl_airflow.core.errors import FileRefused, LaunchError
from ddl_airflow.core.job import (
    LAST_OF_SIGNALS,
    JobHandle,
    JobState,
    JobStatus,
    RankFailure,
    StartedJob,
)
from ddl_airflow.core.progress import Tail

# Exceptions that end the next try in the same way: the code itself is wrong.
_PERMANENT_EXCEPTIONS = frozenset({"SyntaxError", "ImportError", "LeftTensorFlow"})
# What the ops, and TensorFlow's servers, raise on the others when a rank dies, ends or gives up a
# step; docs/ops.md.
_CONSEQUENCES = frozenset(
    {"AbortedError", "FailedPreconditionError", "RankGoneError", "UnavailableError"}
)
_ENDED_EARLY = "has already ended its script"  # the engine's words
_COMMAND_NOT_FOUND = 127
# Fields of a rank's record, by what they hold; docs/process-contract.md.
_TIMES = ("started", "ended", "asked_to_end", "released")
_TEXTS = ("host", "boot", "task", "reason", "python", "cpu")
_LARGEST = 2**53  # a float holds it exactly
_LONGEST = 10_000
# Of what is listed in a record more than any rank has to say: the shim writes some ten versions,
# and as many settings of at most 200 characters each.
_MOST_GPUS = 32
_MOST_FACTS = 100
_LONGEST_FACT = 200
# Of what an exception says before TensorFlow's trace of the graph is taken out.
_LONGEST_MESSAGE = 200_000
_MOST_FILES = 1_000
# What a rank tells of its training: see ddl_ops/averaging.py.
_AVERAGING = ("averaged", "gradients", "alone", "applied", "explicit")
_NOT_EXECUTABLE = 126
# More than a file system keeps for a file that is there.
_PROBE_BYTES = 1 << 16
_ROOM = "Free space there, raise the quota, or use a larger disk."
_NO_ROOM = re.compile(f"{os.strerror(errno.ENOSPC)}|{os.strerror(errno.EDQUOT)}")
# Lines that TensorFlow puts around what an op says. Source: error_interpolation.py, and
# ``AttachDef`` in op_kernel.cc.
_OF_A_GRAPH = re.compile(
    r"Graph execution error:|Detected at node |  File \"[^\"]*\", line \d+, in |\s*\[\["
)


def read_records(handle: JobHandle, *, running: bool = False) -> dict[int, dict[str, Any]]:
    """What the ranks of a job have recorded so far, by rank; fields of another type are left out.

    Args:
        handle: the job.
        running: whether it runs: a record that cannot be read may still be on its way, and is
            left out.

    Raises:
        LaunchError: a record is a link, or holds no JSON object, or the file system does not give
            it.
    """
    records, root = {}, run_folder(handle)
    if not running:  # nobody looks again for a record that NFS says is not there yet
        with suppress(OSError, FileRefused):  # then the reading fails as well
            look_anew(handle.record_dir, root)
    for rank in range(handle.world_size):
        path = handle.record_dir / f"rank-{rank}.json"
        try:
            records[rank] = _sound(read_object(path, root)) | {"rank": rank}
        except FileNotFoundError:
            continue
        except (FileRefused, OSError) as error:
            if not running:
                again = isinstance(error, OSError)  # as ESTALE of NFS
                raise LaunchError(f"rank {rank}: {error}", retryable=again) from error
    return records


def over_since(handle: JobHandle) -> float | None:
    """When a job was over for its ranks, in seconds since 1970; None: it is not.

    That is when the first failed, which ends the others, or when all had ended.
    """
    records = read_records(handle)
    failed = [at for record in records.values() if (at := _failed_at(record)) is not None]
    if failed:
        return min(failed)
    ended = [float(record["ended"]) for record in records.values() if "ended" in record]
    return max(ended) if len(ended) == handle.world_size else None


def run_folder(handle: JobHandle, *others: Path) -> Path:
    """The folder beneath which no link is followed: that of the run, with records and logs."""
    return Path(os.path.commonpath([handle.record_dir, handle.log_dir, *others]))


def reports_of(started: StartedJob) -> Tail | None:
    """What a job reports from its start on, if its script may report."""
    if started.progress is None:
        return None
    path, offset = started.progress
    return Tail(path, offset, run_folder(started.handle, path.parent))


def _sound(said: dict[str, Any]) -> dict[str, Any]:
    """A record without what has not the type that it should have: scripts may write there too."""
    record: dict[str, Any] = {"host": ""}
    record |= {name: float(said[name]) for name in _TIMES if _is_number(said.get(name))}
    record |= {name: _text(said[name]) for name in _TEXTS if isinstance(said.get(name), str)}
    if "task" not in record:  # no rank of MPI is released, whatever it says
        record.pop("released", None)
    code = said.get("exit_code")
    # A rank records its end and its exit code at once.
    if type(code) is int and 0 <= code <= 255 and "ended" in record:
        record["exit_code"] = code
    size = said.get("world_size")
    if type(size) is int and 0 < size <= _LARGEST:
        record["world_size"] = size
    if isinstance(gpus := said.get("gpus"), list):
        models = [_text(one, _LONGEST_FACT) for one in gpus if isinstance(one, str)]
        record["gpus"] = models[:_MOST_GPUS]
    for facts in ("versions", "settings"):
        if isinstance(told := said.get(facts), dict):
            sound = [(name, one) for name, one in told.items() if isinstance(one, str)]
            record[facts] = {
                _text(name, _LONGEST_FACT): _text(one, _LONGEST_FACT)
                for name, one in sound[:_MOST_FACTS]
            }
    if isinstance(exception := said.get("exception"), dict):
        raised, line, bases = (exception.get(name) for name in ("t", "line", "bases"))
        record["exception"] = {
            "t": float(raised) if _is_number(raised) else 0.0,
            "line": line if type(line) is int and _is_number(line) else 0,
            "bases": [one for one in bases[:_MOST_FACTS] if isinstance(one, str)]
            if isinstance(bases, list)
            else [],
            **{name: _text(exception.get(name) or "") for name in ("type", "file")},
            "message": _text(_sentence(str(exception.get("message") or "")[:_LONGEST_MESSAGE])),
        }
    if isinstance(wrote := said.get("wrote"), list):
        names = [_text(one) for one in wrote[:_MOST_FILES] if isinstance(one, str)]
        record["wrote"] = list(dict.fromkeys(names))
    record["listens"] = said.get("listens") is True
    if isinstance(preempted := said.get("preempted"), dict):
        step = preempted.get("step")
        if type(step) is int and 0 <= step <= _LARGEST:
            record["preempted"] = step
    if isinstance(ddl := said.get("ddl"), dict):
        record["ddl"] = {name: ddl.get(name) is True for name in _AVERAGING}
    return record


def _is_number(value: object) -> TypeGuard[float]:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    return abs(value) <= _LARGEST  # not so NaN


def _sentence(message: str) -> str:
    """What an exception says, on one line, without TensorFlow's trace of the graph around it."""
    # One of several errors of a step, which are consequences of the first or the same again.
    _, _, first = message.partition("root error(s) found.")
    if first.lstrip().startswith("(0)"):
        message = re.split(r"^ {0,8}\(1\)", first.lstrip()[3:], maxsplit=1, flags=re.MULTILINE)[0]
    lines = [line for line in message.splitlines() if not _OF_A_GRAPH.match(line)]
    return " ".join(" ".join(lines).split()) or message


def _text(value: object, longest: int = _LONGEST) -> str:
    """What can be shown and written as UTF-8."""
    return str(value)[:longest].encode("utf-8", "replace").decode()


def ranks_status(handle: JobHandle, *, running: bool) -> JobStatus:
    """The state of a job from what its ranks left on disk.

    Where all ranks saved at one step and ended because they were asked to, it is preempted. Else
    every rank must have reached its end: exit code 0 in each of ``world_size`` records, or that it
    was released, as parameter servers are when all others have done their work. And where they are
    to train one model, they must not have trained apart.

    Args:
        handle: the job.
        running: whether the process that holds the ranks together still lives.
    """
    records = read_records(handle, running=running) if handle.nodes or not running else {}
    # At once, not after hours: what does not place ranks as it was told ends them well, too.
    if wrong := _misplaced(handle, records):
        return JobStatus(JobState.FAILED, reason=wrong, permanent=True)
    if running:
        return JobStatus(JobState.RUNNING)
    ended = {rank: r for rank, r in records.items() if "exit_code" in r}
    # Parameter servers are released when the others have made room.
    worked = [r for r in ended.values() if "released" not in r]
    if len(ended) == handle.world_size and worked and all(map(_made_room, worked)):
        return _preempted(handle, {r["preempted"] for r in worked})
    if len(ended) == handle.world_size and all(map(_did_its_work, ended.values())):
        if handle.averages and (reason := _apart(ended, handle.trained_before)):
            return JobStatus(JobState.FAILED, reason=reason, permanent=True, apart=True)
        return JobStatus(JobState.SUCCEEDED)
    failure = _first_failure(handle, records)
    full = "" if failure and failure.exit_code is not None else _full(handle)
    if failure is None:
        from ddl_airflow.launchers.job_preflight import unwell  # no parse needs it

        why = full and f"The ranks left no word: {full}"
        return JobStatus(JobState.LOST, reason=why or unwell(handle.record_dir, run_folder(handle)))
    if full:
        failure = replace(failure, reason=f"could not say how it ended: {full}")
    return JobStatus(JobState.FAILED, failure)


def _misplaced(handle: JobHandle, records: Mapping[int, dict[str, Any]]) -> str:
    """Where the ranks are, if that is not where they were to be; known once all have begun."""
    if not handle.nodes or len(records) < handle.world_size:
        return ""
    # Hosts that were made as copies of one have its name. Where all are in containers of one host,
    # only their names differ.
    on: dict[tuple[str, str], list[int]] = {}
    for rank, record in sorted(records.items()):
        on.setdefault((record["host"], record.get("boot", "")), []).append(rank)
    if handle.cluster:
        wanted = Cluster.parse(handle.cluster).ranks_by_node()
        asked = f"{handle.nodes} hosts, each with its own tasks of the cluster,"
        if sorted(on.values()) == sorted(wanted):
            return ""
    else:
        slots = handle.world_size // handle.nodes
        asked = f"{handle.nodes} hosts with {slots} rank(s) each"
        if len(on) == handle.nodes and all(len(ranks) == slots for ranks in on.values()):
            return ""
    where = ", ".join(f"{_named(ranks)} on {host}" for (host, _), ranks in on.items())
    return (
        f"{asked} were asked for, and this is where ranks ran: {where}. Two names that were given "
        "are of one host, or what starts ranks has not used the hosts that it was given; "
        "logs/launcher.log has its words."
    )


def no_room(error: OSError) -> str:
    """What to do about a full disk."""
    return f"{error.strerror}. {_ROOM}"


def _full(handle: JobHandle) -> str:
    """Says that the ranks' records and logs have no room, if that is so."""
    for folder in (handle.record_dir, handle.log_dir):
        try:
            # It has no name, so nobody can have put a link there.
            with tempfile.TemporaryFile(dir=folder) as probe:
                probe.write(bytes(_PROBE_BYTES))
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                return f"{folder}: {no_room(error)}"
    return ""


def _alone(ddl: Mapping[str, bool]) -> bool:
    # A script that averages tensors by itself may have averaged what it then applied.
    return ddl["alone"] or (ddl["applied"] and not ddl["explicit"])


def _have_averaged(records: Mapping[int, dict[str, Any]]) -> bool:
    """Whether the ranks with these records have averaged gradients."""
    return any(record.get("ddl", {}).get("averaged") for record in records.values())


def written_by_several(records: Mapping[int, dict[str, Any]]) -> dict[str, str]:
    """Each file that several ranks opened for writing, and which ranks, in words."""
    by: dict[str, list[int]] = {}
    for rank, record in sorted(records.items()):
        for name in record.get("wrote", ()):
            by.setdefault(name, []).append(rank)
    return {name: _named(ranks) for name, ranks in by.items() if len(ranks) > 1}


def hidden_exception(records: Mapping[int, dict[str, Any]]) -> RankFailure | None:
    """Of the first rank whose command ended well though its Python did not; None: there is none."""
    for record in records.values():
        by_itself = not {"asked_to_end", "released"} & record.keys()
        if record.get("exit_code") == 0 and "exception" in record and by_itself:
            return _explain(record)
    return None


def how_trained(records: Mapping[int, dict[str, Any]]) -> str:
    """``together`` or ``apart``, however the job ended; empty if no rank computed a gradient."""
    facts = [record["ddl"] for record in records.values() if "ddl" in record]
    if _have_averaged(records):
        return "apart" if sum(map(_alone, facts)) > 1 else "together"
    if not any(one["gradients"] for one in facts):
        return ""
    alone = all(record.get("world_size") == 1 for record in records.values())
    return "together" if alone else "apart"  # one rank has one model


def _apart(records: Mapping[int, dict[str, Any]], before: str) -> str:
    """Which ranks trained by themselves, and what to do; empty if none did.

    Averaging takes all ranks that have started ddl, also those that had no data and have joined.
    One that has not is alone. Where nobody has averaged, ranks that have started ddl and computed
    no gradient found nothing left to train; where an earlier try has trained, also those that have
    not started it. ``before`` is how that one did.
    """
    without = [rank for rank, record in records.items() if "ddl" not in record]
    started = [rank for rank in records if rank not in without]
    averaged = _have_averaged(records)
    alone = [rank for rank in started if _alone(records[rank]["ddl"])]
    if averaged and len(alone) > 1:
        return (
            f"The {len(records)} ranks trained apart, each a model of its own: {_named(alone)} "
            "updated weights with an optimizer that does not average gradients, as one is that "
            "load_model has brought, compile() was given anew, or a second model has. Wrap each: "
            "ddl.keras.DistributedOptimizer(optimizer). If that is meant, write "
            "`distribution: independent` in the manifest."
        )
    trained = any(records[rank]["ddl"]["gradients"] for rank in started)
    found_done = not averaged and not trained and bool(before or not without)
    if found_done and before == "apart":
        return (
            f"The {len(records)} ranks found their training done, by an earlier try in which each "
            "trained a model of its own. Trigger a new run, with a script that averages."
        )
    if (not without and averaged) or found_done:
        return ""
    who = f"{_named(without)} did not import ddl" if without else ""
    if started:
        did = "averaged gradients" if averaged else "imported it and averaged no gradient"
        who = (
            f"{who}, {_named(started)} {did}"
            if who
            else (f"{_named(started)} imported ddl, computed gradients and averaged none")
        )
    cure = (
        "Write `import ddl` in the script before the optimizer is made, and in Keras wrap that: "
        "ddl.keras.DistributedOptimizer(optimizer)."
        if without
        else "In Keras wrap the optimizer, also one that load_model has brought: "
        "ddl.keras.DistributedOptimizer(optimizer). In TensorFlow 1 put `import ddl` before the "
        "line that makes the optimizer."
    )
    return (
        f"The {len(records)} ranks trained apart, each a model of its own: {who}. {cure} Or ask "
        "for one rank. If ranks need not average here, as in a search or with MPI of the script's "
        "own, write `distribution: independent` in the manifest."
    )


def _named(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if len(ranks) > 2 and ranks[-1] - ranks[0] == len(ranks) - 1:
        return f"ranks {ranks[0]} to {ranks[-1]}"
    shown = [str(rank) for rank in ranks[:8]] + ["…"] * (len(ranks) > 8)
    return f"ranks {', '.join(shown[:-1])} and {shown[-1]}"


def _made_room(record: dict[str, Any]) -> bool:
    return record["exit_code"] == 0 and "preempted" in record


def _preempted(handle: JobHandle, steps: set[int]) -> JobStatus:
    if handle.averages and len(steps) > 1:
        why = (
            "The ranks were asked to end, and saved after different steps: "
            f"{', '.join(map(str, sorted(steps)[:8]))}. Give ddl.end_of_step() the number of steps "
            "that all ranks have done."
        )
        return JobStatus(JobState.FAILED, reason=why)
    step = min(steps)
    return JobStatus(JobState.PREEMPTED, reason=f"all ranks saved after step {step}", step=step)


def _did_its_work(record: dict[str, Any]) -> bool:
    # One that was asked to end stopped before its work was done, however well it took it; unless
    # it listens, and came to its end first.
    if "released" in record:
        return True
    undisturbed = "asked_to_end" not in record or record.get("listens", False)
    return record.get("exit_code") == 0 and undisturbed and "preempted" not in record


def _first_failure(handle: JobHandle, records: dict[int, dict[str, Any]]) -> RankFailure | None:
    # One rank's failure ends all, so most records tell of a consequence. The cause is the first
    # that raised, or that ended badly without having been asked to; but for those that raised
    # because they saw another one die, perhaps before its end was recorded.
    failed = [(_failed_at(r), r) for r in records.values() if _failed_at(r) is not None]
    causes = [(at, r) for at, r in failed if not _saw_another_die(r)]
    if causes:
        return _explain(min(causes, key=lambda pair: pair[0] or 0.0)[1])
    # Nobody died before that one: who is killed without a word then is killed with the job.
    early = [(at, r) for at, r in failed if _saw_another_end_early(r)]
    if early:
        return _explain(min(early, key=lambda pair: pair[0] or 0.0)[1])
    for rank, record in records.items():
        if not {"ended", "asked_to_end", "exception"} & record.keys():
            return RankFailure(
                rank=rank,
                host=str(record["host"]),
                exit_code=None,
                reason="was killed without a word (SIGKILL; often the machine ran out of memory). "
                + LESS_MEMORY,
                task=str(record.get("task", "")),
            )
    if failed:
        return _explain(min(failed, key=lambda pair: pair[0] or 0.0)[1])
    return None


def _saw_another_die(record: dict[str, Any]) -> bool:
    return record.get("exception", {}).get("type") in _CONSEQUENCES


def _saw_another_end_early(record: dict[str, Any]) -> bool:
    message = record.get("exception", {}).get("message", "")
    return _saw_another_die(record) and _ENDED_EARLY in message


def killed_on(handle: JobHandle, host: str) -> RankFailure | None:
    """The first rank on a host that did not come to its end; None: no record tells of one."""
    for rank, record in read_records(handle).items():
        if record["host"] == host and not _did_its_work(record):
            task = str(record.get("task", ""))
            return RankFailure(rank=rank, host=host, exit_code=None, reason="was killed", task=task)
    return None


def is_consequence(failure: RankFailure) -> bool:
    """Whether the rank failed because it saw another one end."""
    return failure.exit_code is None or failure.exception in _CONSEQUENCES


def _failed_at(record: dict[str, Any]) -> float | None:
    if "released" in record:
        return None
    told = float(record.get("asked_to_end", math.inf))
    if "exception" in record and record.get("exit_code") != 0:
        raised = float(record["exception"]["t"])
        return raised if raised < told else None
    if record.get("exit_code", 0) != 0 and "asked_to_end" not in record:
        return float(record["ended"])
    return None


def _explain(record: dict[str, Any]) -> RankFailure:
    code = int(record.get("exit_code", 1))
    exception = record.get("exception", {})
    name = str(exception.get("type", ""))
    permanent = code in (_COMMAND_NOT_FOUND, _NOT_EXECUTABLE) or bool(
        _PERMANENT_EXCEPTIONS & {name, *exception.get("bases", [])}
    )
    cure = ""
    if name:
        place = f" at {exception['file']}:{exception['line']}" if exception.get("file") else ""
        message = exception.get("message", "")
        reason = f"raised {name}{place}{': ' if message else ''}{message}"
        cure = advice(name, message)
        if name == "ModuleNotFoundError" and record.get("python") and not cure:
            cure = (
                f"The ranks' Python is {record['python']}: install it there with `-m pip install`, "
                "or name another Python, in [ddl] python or launcher.python; what is yours belongs "
                "beside the script."
            )
    elif code == _COMMAND_NOT_FOUND:
        reason = f"did not start: command not found ({record.get('reason', 'see its log')})"
    elif code == _NOT_EXECUTABLE:
        reason = f"did not start: command cannot be run ({record.get('reason', 'see its log')})"
    elif 128 < code <= LAST_OF_SIGNALS:
        reason = f"was ended by {_signal_name(code - 128)}"
        if code - 128 == signal.SIGKILL:
            reason += " (often the machine ran out of memory)"
            cure = LESS_MEMORY
    else:
        why = f" ({record['reason']})" if "reason" in record else ""
        reason = f"exited with code {code}{why}"
    if _NO_ROOM.search(reason):
        cure = _ROOM
    if cure:
        reason = f"{reason.rstrip('. ')}. {cure}"
    return RankFailure(
        rank=int(record["rank"]),
        host=str(record["host"]),
        exit_code=code,
        reason=reason,
        exception=name,
        permanent=permanent,
        task=str(record.get("task", "")),
    )


def explained(failure: RankFailure, world_size: int) -> str:
    """Which rank failed, where and how, in one sentence: for the train task and for ddl-run."""
    where = f" on {failure.host}" if failure.host else ""
    rank = f"rank {failure.rank} of {world_size}"
    who = f"{failure.task} ({rank})" if failure.task else rank
    reason = failure.reason.rstrip()
    return f"{who}{where} {reason}{'' if reason.endswith(('.', '?', '!')) else '.'}"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"

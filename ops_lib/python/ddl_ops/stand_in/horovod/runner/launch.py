"""``horovodrun``: starts ranks with Horovod's flags, by ``ddl-run``.

    horovodrun -np 4 python train.py
    horovodrun -np 4 -H gpu1:2,gpu2:2 python train.py
    horovodrun -np 4 --min-np 2 -H gpu1:2,gpu2:2 python train.py

What the flags set and ranks can use reaches them as HOROVOD_*; each flag that has no effect is
named. Hosts beside this one are reached by ssh.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import MutableMapping, Sequence

from horovod import __version__

# Flags that take a value and have no effect here.
_WITH_VALUE = """
    --start-timeout --mpi-args --binding-args
    --cycle-time-ms --cache-capacity --autotune-log-file --autotune-warmup-samples
    --autotune-steps-per-sample --autotune-bayes-opt-max-samples
    --autotune-gaussian-process-noise --num-nccl-streams --thread-affinity --gloo-timeout-seconds
    --stall-check-warning-time-seconds
""".split()
_SWITCHES = """
    --disable-cache --gloo --mpi --jsrun --tcp --hierarchical-allreduce
    --no-hierarchical-allreduce --hierarchical-allgather --no-hierarchical-allgather
    --torus-allreduce --no-torus-allreduce --autotune --no-autotune --timeline-mark-cycles
    --no-timeline-mark-cycles --mpi-threads-disable --no-mpi-threads-disable
    --log-with-timestamp --log-without-timestamp
    --log-hide-timestamp --no-log-hide-timestamp --prefix-output-with-timestamp -prefix-timestamp
    --verbose
""".split()
# With --min-np or --host-discovery-script alone.
_ELASTIC = (
    "max_num_proc",
    "reset_limit",
    "elastic_timeout",
    "blacklist_cooldown_range",
    "slots_per_host",
)
# Of a configuration file, by section: what is taken, and what has no effect. Names are Horovod's.
_TAKEN = {
    ("params", "fusion_threshold_mb"): ("fusion_threshold_mb", float),
    ("timeline", "filename"): ("timeline_filename", str),
    ("stall_check", "enabled"): ("stall_check", bool),
    ("stall_check", "shutdown_time_seconds"): ("stall_check_shutdown_time_seconds", int),
    ("logging", "level"): ("log_level", str),
}
# These ask for what happens anyway.
_GRANTED = frozenset(
    """
    --mpi --verbose --disable-cache --log-without-timestamp --log-hide-timestamp
    """.split()
)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the ranks. Returns the exit code of the one that failed first, 0 if none did."""
    parser = _parser()
    options = parser.parse_args(argv)
    if options.check_build:
        print(_BUILT.format(version=__version__))
        return 0
    if options.command[:1] == ["--"]:
        del options.command[0]
    if not options.command:
        parser.error("no command given; for example: horovodrun -np 2 python train.py")
    idle = options.idle or []
    if options.config_file:
        try:
            idle += _configure(options)
        except (OSError, ValueError) as error:
            parser.error(f"--config-file {options.config_file}: {error}")
    if not any((options.num_proc, options.min_num_proc, options.hosts, options.hostfile)):
        parser.error("how many ranks? For example: horovodrun -np 2 python train.py")
    elastic = options.min_num_proc is not None or options.host_discovery_script is not None
    if elastic and options.elastic_timeout is None:
        options.elastic_timeout = os.environ.get("HOROVOD_ELASTIC_TIMEOUT") or None
    for name in () if elastic else _ELASTIC:
        if getattr(options, name) is not None:
            idle.append(f"--{name.replace('_', '-').replace('num-proc', 'np')} without --min-np")
    for flag in idle:
        if flag not in _GRANTED:
            print(f"horovodrun: {flag} has no effect here", file=sys.stderr)
    _set(os.environ, options)
    words = []
    for flag, value in (
        ("--np", options.num_proc),
        ("--hosts", options.hosts),
        ("--hostfile", options.hostfile),
        ("--network", _joined(options.network_interfaces)),
        ("--ssh-port", options.ssh_port),
        ("--ssh-identity-file", options.ssh_identity_file),
        ("--timeline", options.timeline_filename),
        ("--output-dir", options.output_filename),
        ("--min-np", options.min_num_proc),
        *(
            (f"--{name.replace('_', '-').replace('num-proc', 'np')}", getattr(options, name))
            for name in (_ELASTIC if elastic else ())
        ),
        ("--host-discovery-script", options.host_discovery_script),
    ):
        if value is not None:
            words += [flag, *map(str, value if isinstance(value, list) else [value])]
    return _ddl_run([*words, "--", *options.command])


def _joined(lists: list[str] | None) -> str | None:
    """Each name of several "NAME,..." once, in one."""
    return ",".join(dict.fromkeys(",".join(lists).split(","))) if lists else None


def run_commandline() -> None:
    """The command."""
    sys.exit(main())


_BUILT = """\
Horovod v{version} (ddl in its place):

Available Frameworks:
    [X] TensorFlow
    [ ] PyTorch
    [ ] MXNet

Available Controllers:
    [X] MPI
    [ ] Gloo

Available Tensor Operations:
    [ ] DDL
    [ ] CCL
    [X] MPI
    [ ] Gloo"""


class _Idle(argparse.Action):
    """Notes a flag without effect."""

    def __call__(self, parser, namespace, values, option_string=None) -> None:  # type: ignore[no-untyped-def]
        namespace.idle = [*(namespace.idle or []), self.option_strings[-1]]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="horovodrun",
        description="Starts ranks, as ddl-run does, with Horovod's flags.",
        allow_abbrev=False,  # else a flag of the script's that begins like several of ours fails
    )
    parser.add_argument("-v", "--version", action="version", version=__version__)
    parser.add_argument(
        "-cb", "--check-build", action="store_true", help="says what there is, and ends"
    )
    parser.add_argument("-np", "--num-proc", type=int, metavar="N", help="number of ranks")
    hosts = parser.add_mutually_exclusive_group()
    hosts.add_argument("-H", "--hosts", metavar="HOST:SLOTS,...", help="by ssh")
    hosts.add_argument("-hostfile", "--hostfile", metavar="FILE", help="lines of HOST slots=SLOTS")
    hosts.add_argument(
        "--host-discovery-script", metavar="COMMAND", help="prints lines of HOST:SLOTS"
    )
    parser.add_argument(
        *("--network-interfaces", "--network-interface", "--nics"),
        action="append",
        metavar="NAME,...",
        help="of ranks; may be repeated",
    )
    parser.add_argument("-p", "--ssh-port", type=int, metavar="PORT", help="of all hosts")
    parser.add_argument("-i", "--ssh-identity-file", metavar="FILE", help="key for all hosts")
    parser.add_argument(
        "--min-np",
        "--min-num-proc",
        dest="min_num_proc",
        type=int,
        metavar="N",
        help="start again on the hosts that are left for N, from what was committed",
    )
    parser.add_argument(
        "--max-np", "--max-num-proc", dest="max_num_proc", type=int, metavar="N", help="at most"
    )
    parser.add_argument("--reset-limit", type=int, metavar="N", help="how often it starts again")
    parser.add_argument("--elastic-timeout", type=int, metavar="S", help="wait for hosts; 600")
    parser.add_argument(
        "--blacklist-cooldown-range",
        type=int,
        nargs=2,
        metavar=("S", "S"),
        help="how long a host is left out on which a rank has failed",
    )
    parser.add_argument(
        "--slots-per-host", type=int, metavar="N", help="where the discovery script names none"
    )
    parser.add_argument(
        "--output-filename", metavar="DIR", help="what ranks print, in DIR/rank.N as well"
    )
    parser.add_argument("--config-file", metavar="FILE", help="YAML with settings; flags go before")
    parser.add_argument("--timeline-filename", metavar="FILE", help="a Chrome trace")
    parser.add_argument("--fusion-threshold-mb", type=float, metavar="MB", help=argparse.SUPPRESS)
    parser.add_argument(
        "--stall-check-shutdown-time-seconds", type=int, metavar="S", help=argparse.SUPPRESS
    )
    parser.add_argument(
        "--stall-check", action=argparse.BooleanOptionalAction, help=argparse.SUPPRESS
    )
    parser.add_argument("--log-level", metavar="LEVEL", help="TRACE to FATAL")
    parser.set_defaults(idle=None)
    for flag in _WITH_VALUE:
        parser.add_argument(flag, action=_Idle, dest="_", help=argparse.SUPPRESS)
    for flag in _SWITCHES:
        parser.add_argument(flag, action=_Idle, nargs=0, dest="_", help=argparse.SUPPRESS)
    parser.add_argument("command", nargs=argparse.REMAINDER, metavar="COMMAND")
    return parser


def _configure(options: argparse.Namespace) -> list[str]:
    """Takes what a configuration file sets and no flag does; names what has no effect.

    Raises OSError, or ValueError if it is no mapping of sections or a value is of another type.
    """
    import yaml

    with open(options.config_file, encoding="utf-8") as file:
        try:
            found = yaml.safe_load(file)
        except yaml.YAMLError as error:
            raise ValueError(f"it is no YAML: {error}") from None
    if not isinstance(found, dict | None):
        raise ValueError("it has no sections, such as params: and timeline:")
    idle = []
    for section, settings in (found or {}).items():
        if not isinstance(settings, dict):
            idle.append(f"{section} of --config-file")  # controller: gloo
            continue
        for name, value in settings.items():
            if (section, name) not in _TAKEN:
                idle.append(f"{section}.{name} of --config-file")
                continue
            option, kind = _TAKEN[section, name]
            if getattr(options, option) is not None or value is None:
                continue
            try:
                setattr(options, option, kind(value))
            except (TypeError, ValueError):
                raise ValueError(f"{section}.{name} is {value!r}, no {kind.__name__}") from None
    return idle


def _set(environ: MutableMapping[str, str], options: argparse.Namespace) -> None:
    """What ranks take from HOROVOD_*."""
    if options.fusion_threshold_mb is not None:
        environ["HOROVOD_FUSION_THRESHOLD"] = str(int(options.fusion_threshold_mb * 2**20))
    if options.stall_check_shutdown_time_seconds is not None:
        environ["HOROVOD_STALL_SHUTDOWN_TIME_SECONDS"] = str(
            options.stall_check_shutdown_time_seconds
        )
    if options.stall_check is False:
        environ["HOROVOD_STALL_CHECK_DISABLE"] = "1"
    if options.log_level:
        environ["HOROVOD_LOG_LEVEL"] = options.log_level


def _ddl_run(words: list[str]) -> int:
    from ddl_ops import run

    sys.argv = ["ddl-run", *words]
    return run.main()


if __name__ == "__main__":
    run_commandline()

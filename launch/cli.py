"""The `rowcast` command: which commands there are, and how each of them ends.

Exit codes: 0 done; 1 the engine failed; 2 a mistake in what was asked, one sentence on stderr; 130 Ctrl-C, 143 SIGTERM,
129 SIGHUP (the terminal was closed).
A traceback is never a person's answer. Commands import what they need when they run, so `--help` takes no time.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from types import FrameType
from typing import Annotated, NoReturn

import typer

from .commands import bench, engine, pull, replay, run
from .commands.grouped_help import GroupedCommand

EXIT_FAILED = 1
EXIT_USER = 2
EXIT_INTERRUPTED = 130

app = typer.Typer(
    name="rowcast",
    help="Serve large language models from many workers; broadcast only what changed.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # rich's tables cut the long option names on 80 columns
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("run", cls=GroupedCommand)(run.run)
app.command("serve")(engine.serve)
app.command("status")(engine.status)
app.command("stop")(engine.stop)
app.command("pull")(pull.pull)
app.command("replay")(replay.replay)
app.command("explain")(replay.explain)
app.add_typer(bench.app, name="bench")


def _version(wanted: bool) -> None:
    if wanted:
        from .. import __version__

        print(f"rowcast {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_version, is_eager=True, help="Print the version"),
    ] = False,
) -> None:
    pass


def main() -> NoReturn:
    """Run the command line and exit; the console script's entry."""
    sys.exit(run_command(sys.argv[1:]))


def run_command(arguments: list[str]) -> int:
    """Run one command line and return its exit code; what went wrong is one line on stderr."""

    def call() -> int:
        code = app(args=arguments, prog_name="rowcast", standalone_mode=False)
        if code == EXIT_INTERRUPTED:  # what typer makes of a KeyboardInterrupt
            raise KeyboardInterrupt
        return code if isinstance(code, int) else 0

    return run_guarded(call)


def run_guarded(call: Callable[[], int]) -> int:
    """Run a program's body and turn whatever it raises into one line on stderr and an exit code.

    SIGTERM, and SIGHUP unless `nohup` ignores it, are cleaned up after exactly as Ctrl-C is. Their handler raises a
    plain KeyboardInterrupt and leaves a mark: Ray lets no other exception of a handler out of a wait, and typer turns
    even that one into a value.
    """
    terminated: list[int] = []

    def terminate(signal_number: int, frame: FrameType | None) -> None:
        terminated.append(signal_number)
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, terminate)
    if signal.getsignal(signal.SIGHUP) is signal.SIG_DFL:
        signal.signal(signal.SIGHUP, terminate)
    try:
        code = call()
        sys.stdout.flush()
        return code
    except (KeyboardInterrupt, typer.Abort):
        if terminated:
            return _say(f"stopped by {signal.Signals(terminated[0]).name}", 128 + terminated[0])
        return _say("interrupted", EXIT_INTERRUPTED)
    except BrokenPipeError:
        # `rowcast ... | head`: the reader has what it wanted. Python would complain once more at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FAILED
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else EXIT_FAILED
    except Exception as error:
        return _say_error(error)


def _say_error(error: Exception) -> int:
    usage_message = getattr(error, "format_message", None)  # the parser's own errors
    if usage_message is not None:
        sentence = usage_message()
        if type(error).__name__ == "NoArgsIsHelpError":  # typer keeps its click to itself
            print(sentence, file=sys.stderr)
            return EXIT_USER
        return _say(f"{sentence.rstrip('.')}; see rowcast --help", EXIT_USER)
    if isinstance(error, ValueError | FileNotFoundError | ConnectionError | PermissionError):
        return _say(str(error), EXIT_USER)
    if isinstance(error, MemoryError):
        return _say(f"out of memory: {error or 'nothing left'}; ask for less", EXIT_FAILED)
    if isinstance(error, RuntimeError | OSError | TimeoutError):
        return _say(str(error) or type(error).__name__, EXIT_FAILED)
    return _say(
        f"internal error, please report it: {type(error).__name__}: {error} ({_where(error)})",
        EXIT_FAILED,
    )


def _where(error: Exception) -> str:
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    if trace is None:
        return "unknown place"
    return f"{os.path.basename(trace.tb_frame.f_code.co_filename)}:{trace.tb_lineno}"


def _say(sentence: str, code: int) -> int:
    print(f"rowcast: {' '.join(sentence.split())}", file=sys.stderr, flush=True)
    return code


if __name__ == "__main__":
    main()

"""The command line: `draftmill VERB CONFIG [section.key=value ...]`."""

from __future__ import annotations

import argparse
import logging
import os
import sys

from app import __version__
from app.config import Config, load_config
from app.errors import UserError
from app.redact import redact
from app.runfolder import RedactingFilter

log = logging.getLogger("draftmill")
_STAGE_VERBS = {
    "ingest": "read the sources into parts of conversations",
    "generate": "let the target answer and capture its hidden states",
    "vocab": "choose the draft vocabulary",
    "train": "train the draft",
    "export": "write the draft as a checkpoint for vLLM and SGLang",
    "evaluate": "estimate the acceptance length offline on the held-out conversations",
    "bench": "serve the held-out prompts with and without the draft",
    "report": "write report.html",
}


def main(argv: list[str] | None = None) -> None:
    """Entry point; exits with 0, 1 for a fault the user can mend, 130 when interrupted."""
    sys.exit(run(sys.argv[1:] if argv is None else argv))


def run(argv: list[str]) -> int:
    """Run one command; returns the exit status."""
    args = _parser().parse_args(argv)
    _configure_logging(args.verbose)
    try:
        status: int = args.function(args)
        return status
    except UserError as error:
        print(f"draftmill: error: {redact(str(error))}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("draftmill: stopped; the same command resumes from what is committed", file=sys.stderr)
        return 130
    except BrokenPipeError:
        sys.stderr.close()
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="draftmill", description="Train an EAGLE-3 draft for a target model and prove that it is faster."
    )
    parser.add_argument("--version", action="version", version=f"draftmill {__version__}")
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("-v", "--verbose", action="store_true", help="more log lines")
    configured = argparse.ArgumentParser(add_help=False, parents=[common])
    configured.add_argument("config", help="YAML file of the run")
    configured.add_argument(
        "overrides", nargs="*", default=[], metavar="section.key=value", help="values over the file's"
    )
    configured.add_argument("--print-config", action="store_true", help="print the resolved configuration and exit")
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")
    all_stages = verbs.add_parser("run", parents=[configured], help="do every stage that is not up to date")
    all_stages.set_defaults(function=_run_all)
    for name, help_text in _STAGE_VERBS.items():
        verb = verbs.add_parser(name, parents=[configured], help=f"{help_text} (and what it needs)")
        verb.set_defaults(function=_run_stage)
    status = verbs.add_parser("status", parents=[common], help="what of a run is done, what is stale and why")
    status.add_argument("run", help="run folder, or the YAML file of the run")
    status.add_argument("overrides", nargs="*", default=[], metavar="section.key=value", help="as they would be given")
    status.set_defaults(function=_status)
    submit = verbs.add_parser("submit", parents=[configured], help="submit the run to a Ray cluster as a job")
    submit.add_argument("--address", help="dashboard of the cluster, http://HOST:8265 (default: RAY_ADDRESS)")
    submit.add_argument("--follow", action="store_true", help="print the job's log until it ends")
    submit.set_defaults(function=_submit)
    return parser


def _load(args: argparse.Namespace) -> Config:
    return load_config(args.config, args.overrides)


def _run_all(args: argparse.Namespace) -> int:
    return _run_until(args, "report")


def _run_stage(args: argparse.Namespace) -> int:
    return _run_until(args, args.verb)


def _run_until(args: argparse.Namespace, last: str) -> int:
    config = _load(args)
    if args.print_config:
        print(config.to_yaml(), end="")
        return 0
    from app.jobs import settle_run_dir
    from app.pipeline import run_pipeline
    from app.results import summary_lines, write_results
    from app.runfolder import RunFolder
    from app.stages import stages_up_to

    config = settle_run_dir(config)
    timings = run_pipeline(config, stages_up_to(last))
    run_folder = RunFolder(config.run_dir, config.storage.options)
    results = write_results(run_folder, timings)
    print("\n".join(summary_lines(run_folder.url, results)))
    return 0


def _status(args: argparse.Namespace) -> int:
    from app.status import status_lines

    print("\n".join(status_lines(args.run, args.overrides)))
    return 0


def _submit(args: argparse.Namespace) -> int:
    config = _load(args)
    if args.print_config:
        print(config.to_yaml(), end="")
        return 0
    from app.jobs import submit

    return submit(config, args.config, args.overrides, args.address, args.follow)


def _configure_logging(verbose: bool) -> None:
    log.setLevel(logging.DEBUG if verbose else logging.INFO)
    log.propagate = False
    if not log.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(asctime)s %(message)s", "%H:%M:%S"))
        handler.addFilter(RedactingFilter())
        log.addHandler(handler)
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ENABLE_AUTO_CONNECT", "0")  # a late clean-up must not start a second cluster
    if not sys.stderr.isatty():
        os.environ.setdefault("RAY_COLOR_PREFIX", "0")
    # Progress is plain lines; Ray's own bars would break them up.
    os.environ.setdefault("RAY_TQDM_PATCH_PRINT", "0")

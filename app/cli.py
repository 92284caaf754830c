"""The command line: `draftmill VERB CONFIG [section.key=value ...]`."""

from __future__ import annotations

import argparse
import logging
import os
import shutil
import sys
from pathlib import Path

from app import __version__
from app.config import Config, load_config
from app.errors import UserError, first_line
from app.redact import redact
from app.runfolder import RedactingFilter

log = logging.getLogger("draftmill")
_STAGE_VERBS = {
    "ingest": "read the sources into parts of conversations",
    "generate": "let the target answer and capture its hidden states",
    "quality": "count what the answers look like, and stop where a share is too high",
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
    if not argv:
        _parser().print_help()
        return 2
    parser = _parser()
    args, rest = parser.parse_known_args(argv)
    # argparse takes overrides only where they follow the configuration at once; people write options between.
    if any(word.startswith("-") or "=" not in word for word in rest) or (rest and not hasattr(args, "overrides")):
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    if rest:
        args.overrides = [*args.overrides, *rest]
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
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        print(f"draftmill: error: {redact(where)}{redact(error.strerror or first_line(error))}", file=sys.stderr)
        return 1
    except Exception as error:
        if not type(error).__module__.startswith("pyarrow"):
            raise
        said = f"a Parquet file of the run folder is damaged ({redact(first_line(error))})"
        print(f"draftmill: error: {said}; `draftmill run` finds it and makes it again", file=sys.stderr)
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
        if name == "ingest":
            verb.add_argument(
                "--forget", action="append", default=[], metavar="ID", help="first, as `draftmill forget` does"
            )
        if name == "export":
            verb.add_argument(
                "--format", choices=("flat", "speculators"), help="as export.format=...; speculators: that layout too"
            )
        if name == "bench":
            verb.add_argument("--server", metavar="URL", help="as bench.server=...: a running server with the draft")
            verb.add_argument("--baseline-server", metavar="URL", help="as bench.baseline_server=...: one without it")
        if name == "report":
            verb.add_argument(
                "--now", action="store_true", help="of a run folder too: what is finished so far, and run nothing"
            )
    status = verbs.add_parser("status", parents=[common], help="what of a run is done, what is stale and why")
    status.add_argument("run", help="run folder, or the YAML file of the run")
    status.add_argument("overrides", nargs="*", default=[], metavar="section.key=value", help="as they would be given")
    status.add_argument("--watch", action="store_true", help="again and again, until the run ends or Ctrl-C")
    status.set_defaults(function=_status)
    forget = verbs.add_parser(
        "forget", parents=[common], help="remove conversations from every stored stage of a run, for good"
    )
    forget.add_argument("run", help="run folder, or the YAML file of the run")
    forget.add_argument("ids", nargs="+", metavar="ID", help="conversation ids; section.key=value as for run")
    forget.set_defaults(function=_forget)
    clean = verbs.add_parser(
        "clean", parents=[common], help="what a run keeps that it no longer needs; with --apply, delete it"
    )
    clean.add_argument("run", help="run folder, or the YAML file of the run")
    clean.add_argument("overrides", nargs="*", default=[], metavar="section.key=value", help="as they would be given")
    clean.add_argument("--apply", action="store_true", help="delete what is listed")
    clean.add_argument(
        "--only", action="append", default=[], metavar="CLASS", help="captures, states, checkpoints or logs; repeatable"
    )
    clean.set_defaults(function=_clean)
    cleanup = verbs.add_parser(
        "cleanup", parents=[common], help="processes and memory that ended runs left on this host; --kill ends them"
    )
    cleanup.add_argument("--kill", action="store_true", help="end and remove exactly what is listed")
    cleanup.set_defaults(function=_cleanup)
    plan = verbs.add_parser("plan", parents=[common], help="what a run will take, before it starts; or what it took")
    plan.add_argument("config", nargs="?", help="YAML file of the run")
    plan.add_argument("overrides", nargs="*", default=[], metavar="section.key=value", help="values over the file's")
    plan.add_argument("--assume", action="append", default=[], metavar="NAME=NUMBER,...", help="rows, tokens, rates")
    plan.add_argument("--nodes", type=int, help="describe a cluster instead of looking")
    plan.add_argument("--gpus-per-node", type=int)
    plan.add_argument("--gpu-memory", type=float, metavar="GIB")
    plan.add_argument("--gpu", metavar="NAME", help="H200, H100, ...")
    plan.add_argument("--disk-free", type=float, metavar="TB", help="free where the run folder will be")
    plan.add_argument("--price", type=float, metavar="USD", help="of a GPU-hour")
    plan.add_argument("--probe", action="store_true", help="measure the rates: the whole run on a few prompts")
    plan.add_argument("--compare", metavar="RUN", help="planned against actual of a run folder")
    plan.set_defaults(function=_plan)
    looking = argparse.ArgumentParser(add_help=False, parents=[common])
    looking.add_argument("--rows", type=int, default=5, metavar="N", help="how many to show (of each source)")
    looking.add_argument("--source", metavar="NAME", help="this source alone")
    looking.add_argument("--color", action="store_true", help="colours even where the output is no terminal")
    looking.add_argument("--full", action="store_true", help="long texts whole, not their ends alone")
    looking.add_argument("--show-private", action="store_true", help="text of private rows too")
    preview = verbs.add_parser("preview", parents=[looking], help="rows as the model will see them, before the run")
    preview.add_argument("config", help="YAML file of the run")
    preview.add_argument("overrides", nargs="*", default=[], metavar="section.key=value", help="values over the file's")
    preview.add_argument("--html", metavar="FILE", help="write a page instead")
    preview.set_defaults(function=_preview)
    inspect = verbs.add_parser("inspect", parents=[looking], help="samples of a run, and what is wrong with them")
    inspect.add_argument("run", help="run folder, or the YAML file of the run")
    inspect.add_argument("--class", dest="kind", metavar="CLASS", help="only loop, cut, empty, ..., or any")
    inspect.add_argument("--id", help="of a sample or of a row")
    inspect.set_defaults(function=_inspect)
    lint = verbs.add_parser(
        "lint", parents=[common], help="what is wrong with a draft's folder, yours or anyone's, by engine, and the fix"
    )
    lint.add_argument("folder", metavar="DIR", help="folder with config.json and weights")
    lint.add_argument("--target", help="the model it drafts for: a folder, hub id or packaged target")
    lint.add_argument("--engine", type=str.lower, choices=("vllm", "sglang"), help="check for this one alone")
    lint.add_argument("--draft-tokens", type=int, metavar="K", help="for the serve commands")
    lint.add_argument("--trust-remote-code", action="store_true", help="of the target's tokenizer")
    lint.add_argument("--json", action="store_true", help="print JSON")
    lint.set_defaults(function=_lint)
    doctor = verbs.add_parser(
        "doctor", parents=[common], help="why acceptance is low: the checklist on a run, each line with its evidence"
    )
    doctor.add_argument("run", help="run folder, or the YAML file of the run")
    doctor.add_argument("overrides", nargs="*", default=[], metavar="section.key=value", help="as they would be given")
    doctor.add_argument("--json", action="store_true", help="print JSON")
    doctor.set_defaults(function=_doctor)
    compare = verbs.add_parser(
        "compare", parents=[common], help="runs side by side: what is worse than in the first, what is set differently"
    )
    compare.add_argument("runs", nargs="+", metavar="RUN", help="run folder, or the YAML file of a run")
    compare.add_argument("--html", metavar="FILE", help="write a page too")
    compare.set_defaults(function=_compare)
    publish = verbs.add_parser(
        "publish",
        parents=[common],
        help="the draft with a card of its numbers and where they are from, for a model hub",
    )
    publish.add_argument("run", metavar="RUN", help="run folder, or the YAML file of the run")
    publish.add_argument("folder", metavar="DIR", help="folder to write")
    publish.add_argument("--license", metavar="ID", help="of the draft, as the hub writes it: apache-2.0, ...")
    publish.add_argument("--base-model", metavar="ORG/NAME", help="the target's id on the hub")
    publish.add_argument("--force", action="store_true", help="also a draft that is broken; the card says so")
    publish.set_defaults(function=_publish)
    curve = verbs.add_parser(
        "curve", parents=[common], help="is more data worth it: train on shares of a run's samples, or compare runs"
    )
    curve.add_argument(
        "runs", nargs="+", metavar="RUN", help="one run (folder or YAML file), or finished ones; section.key=value"
    )
    curve.add_argument("--fractions", default="1/8,1/4,1/2,1", metavar="A,B,...", help="shares of the samples")
    curve.set_defaults(function=_curve)
    submit = verbs.add_parser("submit", parents=[configured], help="submit the run to a Ray cluster as a job")
    submit.add_argument("--address", help="dashboard of the cluster, http://HOST:8265 (default: RAY_ADDRESS)")
    submit.add_argument("--follow", action="store_true", help="print the job's log until it ends")
    submit.add_argument("--stage", choices=tuple(_STAGE_VERBS), help="the last stage to do; default: all")
    submit.add_argument(
        "--runtime-env", metavar="FILE", help="YAML of Ray's runtime environment: env_vars, pip, excludes, ..."
    )
    submit.set_defaults(function=_submit)
    stop = verbs.add_parser("stop", parents=[common], help="end a run under way cleanly, as a job or on this host")
    stop.add_argument("run", help="run folder, the YAML file of the run, or the id of a submitted job")
    stop.add_argument("--address", help="dashboard of the cluster, http://HOST:8265 (default: RAY_ADDRESS)")
    stop.set_defaults(function=_stop)
    return parser


def _load(args: argparse.Namespace) -> Config:
    return load_config(args.config, args.overrides)


def _run_all(args: argparse.Namespace) -> int:
    return _run_until(args, "report")


def _run_stage(args: argparse.Namespace) -> int:
    if getattr(args, "now", False):
        return _report_now(args)
    return _run_until(args, args.verb)


def _run_until(args: argparse.Namespace, last: str) -> int:
    if getattr(args, "format", None):
        args.overrides = [*args.overrides, f"export.format={args.format}"]
    for key in ("server", "baseline_server"):
        if getattr(args, key, None):
            args.overrides = [*args.overrides, f"bench.{key}={getattr(args, key)}"]
    config = _load(args)
    if args.print_config:
        print(config.to_yaml(), end="")
        return 0
    from app.jobs import settle_run_dir
    from app.pipeline import Timings, run_pipeline
    from app.results import summary_lines, write_results
    from app.runfolder import RunFolder
    from app.stages import stages_up_to

    config = settle_run_dir(config)
    run_folder = RunFolder(config.run_dir, config.storage.options)

    if getattr(args, "forget", None):
        from app.forget import forget

        print("\n".join(forget(config, args.forget)))

    def store(timings: Timings) -> None:
        write_results(run_folder, timings)

    timings = run_pipeline(config, stages_up_to(last), store)
    results = write_results(run_folder, timings)
    print("\n".join(summary_lines(run_folder.url, results)))
    return 0


def _report_now(args: argparse.Namespace) -> int:
    from app.jobs import settle_run_dir
    from app.pipeline import StageContext
    from app.pipelines import report
    from app.runfolder import RunFolder
    from app.status import config_of

    config = settle_run_dir(config_of(args.config, args.overrides))
    run_folder = RunFolder(config.run_dir, config.storage.options)
    if not run_folder.store.exists("config.yaml"):
        raise UserError(f"{run_folder.url} is no run folder yet, so there is nothing to report")
    report.run(StageContext(config, run_folder))
    print(f"{run_folder.url}/{report.PAGE}")
    return 0


def _status(args: argparse.Namespace) -> int:
    from app.status import status_lines, watch_here

    if args.watch:
        watch_here(args.run, args.overrides)
        return 0
    print("\n".join(status_lines(args.run, args.overrides)))
    return 0


def _forget(args: argparse.Namespace) -> int:
    from app.forget import forget
    from app.jobs import settle_run_dir
    from app.status import config_of

    overrides = [i for i in args.ids if "=" in i]
    config = settle_run_dir(config_of(args.run, overrides))
    ids = [i for i in args.ids if i not in overrides]
    print("\n".join(forget(config, ids)))
    return 0


def _clean(args: argparse.Namespace) -> int:
    from app.clean import clean
    from app.jobs import settle_run_dir
    from app.status import config_of

    config = settle_run_dir(config_of(args.run, args.overrides))
    print("\n".join(clean(config, args.apply, args.only)))
    return 0


def _cleanup(args: argparse.Namespace) -> int:
    from app.cleanup import cleanup

    print("\n".join(cleanup(args.kill)))
    return 0


def _plan(args: argparse.Namespace) -> int:
    from app.plan.command import Described, compare_run, lines_of, plan_run

    if args.compare is not None:
        print("\n".join(compare_run(args.compare)))
        return 0
    if args.config is None:
        raise UserError("plan needs a configuration, or --compare with a run folder")
    if Path(args.config).is_dir() or "://" in args.config:
        print("\n".join(compare_run(args.config)))
        return 0
    from app.jobs import settle_run_dir

    config = settle_run_dir(_load(args))
    if args.price is not None and args.price <= 0:
        raise UserError(f"--price {args.price:g} is not above 0")
    described = Described(args.nodes, args.gpus_per_node, args.gpu_memory, args.disk_free, args.gpu)
    plan = plan_run(config, args.assume, described, args.price, args.probe)
    print("\n".join(lines_of(plan, config)))
    plan.require_fit()
    return 0


def _preview(args: argparse.Namespace) -> int:
    from app.preview import preview, preview_lines, preview_page, require_kept, write_page

    config = _load(args)
    views = preview(config, args.rows, args.source, args.show_private)
    if args.html is not None:
        write_page(args.html, preview_page(views, config, args.full))
        print(args.html)
    else:
        for line in preview_lines(views, config, _coloured(args), args.full):
            print(line)
    require_kept(views)
    return 0


def _inspect(args: argparse.Namespace) -> int:
    from app.inspect import CHOICES, Wanted, inspect_lines

    if args.kind is not None and args.kind not in CHOICES:
        raise UserError(f"there is no class {args.kind!r}; the classes are {', '.join(CHOICES)}")
    wanted = Wanted(args.rows, args.source, args.kind, args.id)
    for line in inspect_lines(args.run, wanted, _coloured(args), args.show_private, args.full):
        print(line)
    return 0


def _lint(args: argparse.Namespace) -> int:
    from app.lint.command import as_json, lint
    from app.lint.difference import ENGINES

    if args.draft_tokens is not None and args.draft_tokens < 1:
        raise UserError(f"--draft-tokens {args.draft_tokens} is not above 0")
    engine = next((e for e in ENGINES if e.lower() == args.engine), None)
    report = lint(args.folder, args.target, engine, args.draft_tokens, args.trust_remote_code)
    width = max(100, shutil.get_terminal_size((140, 24)).columns)
    print(as_json(report) if args.json else "\n".join(report.lines(width)))
    return 0 if report.passes else 1


def _doctor(args: argparse.Namespace) -> int:
    from app.doctor.command import as_json, doctor

    report = doctor(args.run, args.overrides)
    print(as_json(report) if args.json else "\n".join(report.text()))
    return 0 if report.passes else 1


def _compare(args: argparse.Namespace) -> int:
    from app.preview import write_page
    from app.report.compare import compare_page, compare_runs, compare_text

    compared = compare_runs(args.runs)
    print("\n".join(compare_text(compared)))
    if args.html is not None:
        write_page(args.html, compare_page(compared))
        print(args.html)
    return 0


def _publish(args: argparse.Namespace) -> int:
    from app.report.publish import publish

    print("\n".join(publish(args.run, args.folder, args.license, args.base_model, args.force)))
    return 0


def _curve(args: argparse.Namespace) -> int:
    from app.curve import curve_of_run, curve_of_runs
    from app.jobs import settle_run_dir
    from app.status import config_of

    overrides = [word for word in args.runs if "=" in word]
    configs = [settle_run_dir(config_of(run, overrides)) for run in args.runs if run not in overrides]
    if not configs:
        raise UserError("curve needs a run folder, or the YAML file of a run")
    lines = curve_of_runs(configs) if len(configs) > 1 else curve_of_run(configs[0], args.fractions.split(","))
    print("\n".join(lines))
    return 0


def _coloured(args: argparse.Namespace) -> bool:
    return bool(args.color) or (sys.stdout.isatty() and "NO_COLOR" not in os.environ)


def _submit(args: argparse.Namespace) -> int:
    config = _load(args)
    if args.print_config:
        print(config.to_yaml(), end="")
        return 0
    from app.submit import Submission, submit

    submission = Submission(config, args.config, args.overrides, args.stage, args.runtime_env)
    return submit(submission, args.address, args.follow)


def _stop(args: argparse.Namespace) -> int:
    from app.stop import stop

    print("\n".join(stop(args.run, args.address)))
    return 0


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

"""The command line: `extract [flags]`, and `extract info|verify|tokens|corpora|fetch`.

Results go to stdout, progress and messages to stderr; errors are one message and an exit code (see errors.py).
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import json
import os
import re
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

from permafrost.extractor.config import add_flags, load_config
from permafrost.extractor.errors import DamageError, PermafrostError, UsageError

SHOWN_PROBLEMS = 20
_EPILOG = """\
further commands:
  extract info STORE      what a store holds, where it came from, statistics of each layer
  extract verify STORE    read and check every byte of a store
  extract tokens TEXT     a text as the model sees it, the kept tokens in brackets
  extract corpora         the corpora that go by a name
  extract fetch           model and corpus into the cache, for machines without a network
"""


class Terminated(BaseException):
    """SIGTERM arrived."""


class _Tracebacks:
    """Whether `--debug` (or `debug: true` in a config file) was given."""

    shown = False


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message} (see {self.prog} --help)")


def main(argv: list[str] | None = None) -> int:
    """`extract …`: returns the exit code."""
    argv = sys.argv[1:] if argv is None else argv
    _Tracebacks.shown = "--debug" in argv
    try:
        with _sigterm_raises():
            return _dispatch(_join_negative(argv))
    except PermafrostError as error:
        return _fail(f"extract: {error}", error.exit_code)
    except KeyboardInterrupt:
        return _fail("extract: stopped by Ctrl-C; finished shards are kept, the same command goes on", 130)
    except Terminated:
        return _fail("extract: stopped by SIGTERM; finished shards are kept, the same command goes on", 143)
    except BrokenPipeError:  # the reader of our output went away
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:
        what = "the disk is full" if error.errno == errno.ENOSPC else error.strerror or str(error)
        where = f" ({error.filename})" if error.filename else ""
        again = "finished shards are kept, the same command goes on"
        return _fail(f"extract: {what}{where}; {again}", 1)
    except Exception as error:
        first = (str(error).strip().splitlines() or [""])[0]
        return _fail(f"extract: {type(error).__name__}: {first}\nThis is a defect; --debug shows where.", 1)


def permafrost(argv: list[str] | None = None) -> int:
    """`permafrost extract …`, the same as `extract …`."""
    argv = sys.argv[1:] if argv is None else argv
    if argv[:1] != ["extract"]:
        print("usage: permafrost extract …  (the same as `extract …`; see extract --help)", file=sys.stderr)
        return 0 if argv[:1] in (["-h"], ["--help"]) else 2
    return main(argv[1:])


@contextlib.contextmanager
def _sigterm_raises() -> Iterator[None]:
    """SIGTERM ends the run as Ctrl-C does, unwinding; what it did before comes back at the end."""

    def terminate(*_: Any) -> None:
        raise Terminated

    try:
        before = signal.signal(signal.SIGTERM, terminate)
    except ValueError:  # not in the main thread, where signals do not arrive
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _fail(message: str, code: int) -> int:
    if _Tracebacks.shown:
        traceback.print_exc()
    print(message, file=sys.stderr)
    return code


def _join_negative(argv: list[str]) -> list[str]:
    """`--layers -1,embed` as `--layers=-1,embed`: argparse would take the value for a flag."""
    joined: list[str] = []
    for word in argv:
        if joined and joined[-1] == "--layers" and re.match(r"-\d", word):
            joined[-1] += f"={word}"
        else:
            joined.append(word)
    return joined


def _dispatch(argv: list[str]) -> int:
    commands: dict[str, Callable[[list[str]], int]] = {
        "info": _info,
        "verify": _verify,
        "tokens": _tokens,
        "corpora": _corpora,
        "fetch": _fetch,
    }
    if argv and argv[0] in commands:
        return commands[argv[0]](argv[1:])
    return _extract(argv)


def _parse_config(parser: argparse.ArgumentParser, argv: list[str], only: tuple[str, ...] = ()) -> tuple[Any, Any]:
    """The command's own arguments, and the config made of the flags and the file."""
    add_flags(parser, only)
    parser.add_argument("--config", help="a .yaml or .toml file with the same settings; flags win", metavar="FILE")
    arguments = vars(parser.parse_args(argv))
    own = {name: arguments.pop(name) for name in ("text", "config") if name in arguments}
    config = load_config(arguments, own["config"])
    _Tracebacks.shown |= config.debug
    return own, config


def _extract(argv: list[str]) -> int:
    parser = _Parser(
        prog="extract",
        description="Run a corpus through a frozen language model and keep the last-token residual of every layer.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    _, config = _parse_config(parser, argv)
    if not argv:
        parser.print_help()
        return 2
    _quiet_libraries()
    if config.dry_run:
        from permafrost.extractor.dryrun import dry_run, dry_run_text

        plan = dry_run(config)
        print(json.dumps(plan) if config.json else dry_run_text(plan))
        return 0
    from permafrost.extractor.report import summary_text
    from permafrost.extractor.run import run

    summary = run(config)
    print(json.dumps(summary.as_dict()) if config.json else summary_text(summary))
    return 0


def _info(argv: list[str]) -> int:
    parser = _Parser(prog="extract info", description="What a store holds.", allow_abbrev=False)
    parser.add_argument("store", metavar="STORE")
    parser.add_argument("--config", action="store_true", help="print the config that made it, for --config FILE")
    parser.add_argument("--json", action="store_true", help="everything, as JSON")
    parser.add_argument("--debug", action="store_true", help="show tracebacks")
    arguments = parser.parse_args(argv)
    from permafrost.extractor.reader import Store
    from permafrost.extractor.report import config_text, info, info_text

    store = Store(arguments.store)
    if arguments.config:
        print(config_text(store))
    else:
        document = info(store)
        print(json.dumps(document) if arguments.json else info_text(document))
    return 0


def _verify(argv: list[str]) -> int:
    parser = _Parser(prog="extract verify", description="Read and check every byte of a store.", allow_abbrev=False)
    parser.add_argument("store", metavar="STORE")
    parser.add_argument("--json", action="store_true", help="the verdict as JSON")
    parser.add_argument("--quiet", action="store_true", help="no progress bar")
    parser.add_argument("--debug", action="store_true", help="show tracebacks")
    arguments = parser.parse_args(argv)
    from pathlib import Path

    from tqdm import tqdm

    from permafrost.extractor.report import size
    from permafrost.extractor.verify import verify

    hidden = arguments.quiet or not sys.stderr.isatty()
    with tqdm(unit=" rows", unit_scale=True, file=sys.stderr, disable=hidden, leave=False) as bar:
        verdict = verify(Path(arguments.store), bar.update)
    if arguments.json:
        print(json.dumps({"ok": not verdict.problems, **vars(verdict)}))
    elif not verdict.problems:
        print(f"{arguments.store}: whole: {verdict.rows:,} rows, {size(verdict.read_bytes)} read and checked")
    if verdict.problems:
        more = len(verdict.problems) - SHOWN_PROBLEMS
        shown = [*verdict.problems[:SHOWN_PROBLEMS], *([f"… and {more:,} more (--json lists all)"] if more > 0 else [])]
        listed = "\n  ".join(shown)
        raise DamageError(f"{arguments.store} is damaged or not complete:\n  {listed}")
    return 0


def _tokens(argv: list[str]) -> int:
    parser = _Parser(prog="extract tokens", description="A text as the model sees it.", allow_abbrev=False)
    parser.add_argument("text", metavar="TEXT")
    wanted = ("model", "revision", "template", "bos", "max_tokens", "pool", "skip_first", "debug")
    own, config = _parse_config(parser, argv, wanted)
    _quiet_libraries()
    from permafrost.extractor.dryrun import tokens_text
    from permafrost.extractor.model import find_model
    from permafrost.extractor.plan import make_encoder

    encoder = make_encoder(config, find_model(config.model, config.revision))
    if encoder.fields:
        raise UsageError(f"--template asks for columns ({', '.join(encoder.fields)}); a single text has none")
    encoded = encoder.encode([own["text"]])
    cut = f", cut to {encoder.max_tokens}" if encoded.truncated[0] else ""
    print(f"{tokens_text(encoder, config, encoded.ids)}\n{encoded.lengths[0]} tokens{cut}")
    return 0


def _corpora(argv: list[str]) -> int:
    parser = _Parser(prog="extract corpora", description="The corpora that go by a name.", allow_abbrev=False)
    parser.add_argument("--debug", action="store_true", help="show tracebacks")
    parser.parse_args(argv)
    from permafrost.extractor.corpus import NAMED

    for name, spec in NAMED.items():
        print(f"{name:<11} {spec.about}; {spec.licence}; splits {', '.join(spec.files)}")
    print("Also: a .txt, .jsonl, .csv, .tsv or .parquet file, a folder or glob of them, or hf:owner/name[:config].")
    return 0


def _fetch(argv: list[str]) -> int:
    parser = _Parser(prog="extract fetch", description="Model and corpus into the cache.", allow_abbrev=False)
    _, config = _parse_config(parser, argv, ("model", "revision", "corpus", "split", "data_dir", "debug"))
    _quiet_libraries()
    from permafrost.extractor.corpus import open_corpus
    from permafrost.extractor.model import find_model, load_tokenizer

    files = find_model(config.model, config.revision)
    load_tokenizer(files)
    print(f"model {config.model}: {files.blocks} layers of width {files.width} in {files.folder}")
    if config.corpus:
        corpus = open_corpus(config.corpus, config.split, config.data_dir)
        print(f"corpus {config.corpus}: columns {', '.join(corpus.schema.names)}")
    return 0


def _quiet_libraries() -> None:
    """Keep other libraries' warnings and bars out of the terminal; ours says what matters."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    import huggingface_hub.utils.logging as hub_logging
    import transformers

    hub_logging.set_verbosity_error()  # else a line for each of its five tries where there is no network
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()


if __name__ == "__main__":
    sys.exit(main())

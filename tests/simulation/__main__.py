"""Run seeds: ``python -m tests.simulation --seeds 1000``. See ``docs/development.md``."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import traceback
from statistics import median

from tests.simulation.coverage import Coverage
from tests.simulation.runner import Case, Result, Stems, import_all, plan_of, run_all, services
from tests.simulation.shrink import shrink


def main() -> int:
    """Run what the command line says; return 1 if a promise was broken."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("--seeds", type=int, default=1000, help="runs of each service and protocol")
    parser.add_argument("--first", type=int, default=1, help="the first seed")
    parser.add_argument("--service", action="append", help="only this service; may be repeated")
    parser.add_argument("--protocol", action="append", help="only this protocol; may be repeated")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes")
    parser.add_argument("--case", action="append", help="run this case and print its history; may be repeated")
    parser.add_argument("--total", type=int, help="stop after so many runs")
    parser.add_argument("--plant", help="name of a fault to plant, see tests.simulation.proof")
    parser.add_argument("--coverage", action="store_true", help="report which code of the product did not run")
    parser.add_argument("--digests", action="store_true", help="print the digest of each run")
    parser.add_argument("--quiet", action="store_true", help="print the history of a case only if it failed")
    parser.add_argument("--shrink", help="make this case smaller")
    parser.add_argument("--stop", type=int, default=20, help="stop after so many failures")
    arguments = parser.parse_args()
    if arguments.plant:
        from tests.simulation.planting import plant

        plant(arguments.plant)
    coverage = Coverage(import_all) if arguments.coverage else None
    import_all()
    with Stems() as stems:
        if arguments.shrink:
            return _show(stems, shrink(Case.parse(arguments.shrink), stems, _say))
        if arguments.case:
            return max(_show(stems, Case.parse(case), is_quiet=arguments.quiet) for case in arguments.case)
    cases = [
        Case(name, protocol, seed)
        for seed in range(arguments.first, arguments.first + arguments.seeds)
        for name, kind in services().items()
        for protocol in kind.protocols
        if (name in arguments.service if arguments.service else kind.is_complete)
        and (not arguments.protocol or protocol in arguments.protocol)
    ]
    if not cases:
        parser.error("no service has this name and protocol")
    if arguments.total:
        cases = cases[: arguments.total]
    begin = os.times().elapsed
    results: list[Result] = []
    failed: list[Result] = []
    running = run_all(cases, arguments.jobs, covers=arguments.coverage)
    status = 0
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        for result in running:
            results.append(result)
            if coverage is not None:
                coverage.add(result)
                result.measured = ""
            if arguments.digests:
                _say(f"{result.case} {result.digest}")
            if result.failures:
                failed.append(result)
                _say(f"FAILED {result.case}: {result.failures[0][:300]}")
                if len(failed) >= arguments.stop:
                    _say("stopped")
                    running.close()
    except KeyboardInterrupt:
        _say("interrupted")
        status = 130  # as a shell tells it
    _summary(results, os.times().elapsed - begin)
    if coverage is not None:
        coverage.report(sys.stdout)
    return 1 if failed else status


def _show(stems: Stems, case: Case, *, is_quiet: bool = False) -> int:
    try:
        plan = plan_of(case)
    except LookupError as error:
        _say(f"{case}: {error.args[0]}")
        return 2
    result = stems.run(case, wants_history=True)
    if is_quiet and not result.failures:
        return 0
    for step in plan.steps:
        _say(f"  {step}")
    for fault in plan.faults:
        _say(f"  {fault}")
    _say(f"  {plan.options}")
    for when, who, what in result.history:
        _say(f"{when:12.6f} {who:<34} {what}")
    for failure in result.failures:
        _say(f"BROKEN: {failure}")
    _say(f"{result.case}: {result.digest}, {result.seconds:.3f} virtual seconds")
    return 1 if result.failures else 0


def _summary(results: list[Result], seconds: float) -> None:
    """Say what ran, at which rate, and which faults happened, or never did."""
    faults: dict[str, int] = {}
    by_kind: dict[tuple[str, str], list[Result]] = {}
    for result in results:
        case = Case.parse(result.case)
        by_kind.setdefault((case.service, case.protocol), []).append(result)
        for name, count in result.faults.items():
            faults[name] = faults.get(name, 0) + count
    _say(
        f"{len(results)} runs, {sum(bool(each.failures) for each in results)} failed, in {seconds:.1f} s:"
        f" {60 * len(results) / seconds:,.0f} runs and {_hours(results) * 60 / seconds:.1f} virtual hours a minute"
    )
    _say(
        f"{'service':<13}{'protocol':<9}{'runs':>7}{'failed':>7}{'hours':>8}   medians: {'steps':>5}{'faults':>7}"
        f"{'changes':>8}   a minute of a processor: {'runs':>6}{'hours':>6}"
        f"   at most: {'MiB':>4}"
    )
    for (service, protocol), runs in sorted(by_kind.items()):
        minutes = sum(each.cost for each in runs) / 60 or 1e-9
        _say(
            f"{service:<13}{protocol:<9}{len(runs):>7,}{sum(bool(each.failures) for each in runs):>7,}"
            f"{_hours(runs):>8.1f}            {median(each.steps for each in runs):>5g}"
            f"{median(sum(each.faults.values()) for each in runs):>7g}{median(each.switches for each in runs):>8g}"
            f"                            {len(runs) / minutes:>6,.0f}{_hours(runs) / minutes:>6.1f}"
            f"            {max(each.memory for each in runs):>4.0f}"
        )
    for name, count in sorted(faults.items()):
        _say(f"{count:10,} {name}")
    known = {
        name.removeprefix("fault_")
        for service in {service for service, _ in by_kind}
        for name in dir(services()[service])
        if name.startswith("fault_")
    }
    if unseen := sorted(known - faults.keys()):
        _say(f"faults that did not happen: {', '.join(unseen)}")


def _hours(results: list[Result]) -> float:
    """Return the virtual time of some runs."""
    return sum(each.seconds for each in results) / 3600


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    status = 1
    try:
        status = main()
    except Exception:  # noqa: BLE001  # such as a reader of the output that is gone
        traceback.print_exc()
    os._exit(status)  # the interpreter would wait for threads of the worlds

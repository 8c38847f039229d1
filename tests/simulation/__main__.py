"""Run seeds: ``python -m tests.simulation --seeds 1000``. See ``docs/development.md``."""

from __future__ import annotations

import argparse
import os
import sys
from statistics import median

from tests.simulation.runner import Case, Result, plan_of, run_all, run_forked, services, warm_up
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
    parser.add_argument("--digests", action="store_true", help="print the digest of each run")
    parser.add_argument("--quiet", action="store_true", help="print the history of a case only if it failed")
    parser.add_argument("--shrink", help="make this case smaller")
    parser.add_argument("--stop", type=int, default=20, help="stop after so many failures")
    arguments = parser.parse_args()
    if arguments.plant:
        from tests.simulation.planting import plant

        plant(arguments.plant)
    warm_up()
    if arguments.shrink:
        return _show(shrink(Case.parse(arguments.shrink), _say))
    if arguments.case:
        return max(_show(Case.parse(case), is_quiet=arguments.quiet) for case in arguments.case)
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
    for result in run_all(cases, arguments.jobs):
        results.append(result)
        if arguments.digests:
            _say(f"{result.case} {result.digest}")
        if result.failures:
            failed.append(result)
            _say(f"FAILED {result.case}: {result.failures[0][:300]}")
            if len(failed) >= arguments.stop:
                _say("stopped")
                break
    _summary(results, os.times().elapsed - begin)
    return 1 if failed else 0


def _show(case: Case, *, is_quiet: bool = False) -> int:
    result = run_forked(case, wants_history=True)
    if is_quiet and not result.failures:
        return 0
    for step in plan_of(case).steps:
        _say(f"  {step}")
    for fault in plan_of(case).faults:
        _say(f"  {fault}")
    _say(f"  {plan_of(case).options}")
    for when, who, what in result.history:
        _say(f"{when:12.6f} {who:<34} {what}")
    for failure in result.failures:
        _say(f"BROKEN: {failure}")
    _say(f"{result.case}: {result.digest}, {result.seconds:.3f} virtual seconds")
    return 1 if result.failures else 0


def _summary(results: list[Result], seconds: float) -> None:
    faults: dict[str, int] = {}
    for result in results:
        for name, count in result.faults.items():
            faults[name] = faults.get(name, 0) + count
    virtual = sum(result.seconds for result in results)
    _say(
        f"{len(results)} runs, {sum(bool(each.failures) for each in results)} failed, in {seconds:.1f} s:"
        f" {60 * len(results) / seconds:,.0f} runs and {virtual / 60 / seconds:.1f} virtual hours a minute;"
        f" median of {median(each.steps for each in results):g} steps,"
        f" {median(sum(each.faults.values()) for each in results):g} faults,"
        f" {median(each.switches for each in results):g} changes of threads"
    )
    for name, count in sorted(faults.items()):
        _say(f"  {count:8,} {name}")


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    status = main()
    os._exit(status)  # the interpreter would wait for threads of the worlds

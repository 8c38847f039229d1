"""Lanes under everything at once: receivers that are quick, slow or hang, lanes that come and go, loops that end."""

from __future__ import annotations

import asyncio
import logging
import random
import threading
import time
from collections.abc import Callable
from typing import Any

from messaging.execution import Lane, LoopLane, Pool, ThreadLane
from messaging.testing.waiting import PATIENCE, eventually
from tests.threads import Loop, in_background

#: seconds a receiver may take
TIMEOUT = 0.05
LIMIT = 50


class Call:
    """One call of a receiver."""

    def __init__(self, item: Any) -> None:
        self.item = item
        self.is_over = False


class Subject:
    """A lane, what was put into it and what came out."""

    def __init__(self, stress: Stress, loop: Loop | None, *, is_held: bool, newest: bool) -> None:
        self.stress = stress
        self.loop = loop
        self.is_held = is_held
        #: only one publisher puts into it, and the newest items take the place of the oldest
        self.newest = newest
        self.put: dict[int, int] = {}
        self.first: list[Any] = []
        self.seen: list[Any] = []
        self.lost = 0
        self.is_closed = False
        self.stalls = 0
        self.dropped: dict[int, set[int]] = {}
        self.wrong: list[str] = []
        self._lock = threading.Lock()
        self._call: Call | None = None
        options = {"timeout": TIMEOUT, "stalled": self._stalled, "limit": LIMIT, "is_held": is_held}
        self.lane: Lane
        if loop is None:
            self.lane = ThreadLane(self._receive, stress.pool, "a subject", **options)
        else:
            self.lane = LoopLane(self._receive_async, loop.loop, stress.pool, "a subject", **options)

    # --- what comes out

    def _begin(self, item: Any) -> Call:
        with self._lock:
            if self._call is not None and not self._call.is_over:
                self.wrong.append(f"{item} came while {self._call.item} was in progress")
            self._call = call = Call(item)
            self.seen.append(item)
        return call

    def _receive(self, item: Any) -> None:
        call = self._begin(item)
        chance = random.random()
        if chance < 0.02:
            time.sleep(random.uniform(0, 0.005))  # sleeps: random interleavings of threads
        elif chance < 0.023:
            time.sleep(TIMEOUT * random.uniform(0.8, 1.2))  # sleeps: about as long as the time limit
        elif chance < 0.024:
            self.stress.hang()
        elif chance < 0.1:
            self.stress.publish_one(-1, inside=True)
        call.is_over = True

    async def _receive_async(self, item: Any) -> None:
        call = self._begin(item)
        try:
            chance = random.random()
            if chance < 0.05:
                await asyncio.sleep(random.uniform(0, 0.005))  # sleeps: random interleavings of threads
            elif chance < 0.053:
                await asyncio.sleep(TIMEOUT * random.uniform(0.8, 1.2))  # sleeps: about as long as the time limit
            elif chance < 0.054:
                await asyncio.sleep(PATIENCE)  # sleeps: until it is cancelled
            elif chance < 0.055:
                time.sleep(TIMEOUT / 2)  # noqa: ASYNC251  # sleeps: about as long as the time limit
            elif chance < 0.1:
                self.stress.publish_one(-1, inside=True)
        finally:
            call.is_over = True

    def _stalled(self, lane: Lane) -> None:
        self.stalls += 1
        if isinstance(lane, LoopLane):
            if lane.task.is_orphaned:
                self.close()
            else:
                lane.task.cancel()
        elif random.random() < 0.2:
            self.close()
        else:
            with self._lock:
                if self._call is not None:
                    self._call.is_over = True  # whether it returns or not, it is on its own
            lane.restart()

    # --- what goes in

    def publish(self, who: int) -> None:
        """Put the next item of a publisher; each calls it from one thread only."""
        number = self.put.get(who, 0)
        self.put[who] = number + 1
        if self.newest:
            self.lane.put_newest((who, number))
        elif not self.lane.has_room():
            self.dropped.setdefault(who, set()).add(number)
        elif number % 10:
            self.lane.put((who, number))
        else:
            self.put[who] = number + 3
            self.lane.put_all([(who, number + each) for each in range(3)])

    def release(self) -> None:
        self.is_held = False
        self.first = [("first", number) for number in range(random.randrange(5))]
        self.lane.release(self.first)

    def close(self) -> None:
        self.lost += self.lane.close()
        self.is_closed = True

    # --- what is to be

    def check(self) -> None:
        """Nothing twice, nothing lost, nothing in another order than it was put."""
        assert not self.wrong, self.wrong
        assert len({*self.seen}) == len(self.seen)
        if not self.is_closed:
            assert self.seen[: len(self.first)] == self.first or self.newest
        total = 0
        for who, count in self.put.items():
            dropped = self.dropped.get(who, set())
            expected = [number for number in range(count) if number not in dropped]
            mine = [number for each, number in self.seen if each == who]
            total += len(expected)
            if self.newest:
                assert mine == sorted(mine)
            else:
                assert mine == expected[: len(mine)], (who, mine, expected)
                assert self.is_closed or len(mine) == len(expected), (who, len(mine), len(expected))
        total += len(self.first)
        found = len(self.seen) + self.lost
        if self.newest:
            found += self.lane.room.dropped
        if self.is_closed:
            assert found <= total
        else:
            assert found == total, (found, total)
            assert self.newest or self.lane.room.dropped == sum(map(len, self.dropped.values()))


class Stress:
    """Publishers, receivers, and somebody who makes, releases, cancels, waits for and closes lanes at random."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        random.seed(seed)
        self.pool = Pool(6)
        self.loops = [Loop(), Loop()]
        self.subjects: list[Subject] = []
        self.past: list[Subject] = []
        self.waited = 0
        self.reached: list[int] = []
        self._over = threading.Event()
        self._hung = threading.Event()
        self._inside = threading.Lock()
        logging.getLogger("messaging.execution.lanes").addFilter(_is_no_overflow)
        for number in range(16):
            self._add(number)

    def close(self) -> None:
        self._over.set()
        self._hung.set()
        for loop in self.loops:
            loop.close()
        logging.getLogger("messaging.execution.lanes").removeFilter(_is_no_overflow)

    def hang(self) -> None:
        self._hung.wait(PATIENCE)

    def _add(self, place: int) -> None:
        newest = place in (0, 1)
        loop = self.loops[place % len(self.loops)] if place % 3 == 2 else None
        subject = Subject(self, loop, is_held=self.chance.random() < 0.3, newest=newest)
        if place < len(self.subjects):
            self.past.append(self.subjects[place])
            self.subjects[place] = subject
        else:
            self.subjects.append(subject)

    def publish_one(self, who: int, *, inside: bool = False) -> None:
        if inside:
            # of all receivers, since they are on many threads
            with self._inside:
                self._choose().publish(who)
        else:
            self._choose().publish(who)

    def _choose(self) -> Subject:
        while True:
            subject = random.choice(self.subjects)
            if not subject.newest:
                return subject

    def _publish(self, who: int) -> None:
        while not self._over.is_set():
            self.publish_one(who)
            if who == 0:
                for subject in self.subjects[:2]:
                    subject.publish(who)
            if random.random() < 0.02:
                time.sleep(random.uniform(0, 0.003))  # sleeps: random interleavings of threads

    async def _publish_async(self, who: int) -> None:
        while not self._over.is_set():
            for _ in range(random.randrange(20)):
                self.publish_one(who)
            await asyncio.sleep(random.choice((0, 0, 0, 0.002)))  # sleeps: random interleavings of threads

    def _meddle(self) -> None:
        """Of those who change lanes, there is one."""
        while not self._over.is_set():
            place = self.chance.randrange(len(self.subjects))
            subject = self.subjects[place]
            action = self.chance.random()
            if subject.is_held:
                if action < 0.5:
                    subject.release()
                elif action < 0.55:
                    subject.close()
                    self._add(place)
            elif subject.is_closed or action < 0.1:
                subject.close()
                self._add(place)
            elif action < 0.5:
                self.waited += 1
                number = self.waited
                subject.lane.when_done(lambda number=number: self.reached.append(number))  # type: ignore[misc]
            elif action < 0.6 and isinstance(subject.lane, LoopLane):
                subject.lane.task.cancel()
            elif action < 0.605:
                place = self.chance.randrange(len(self.loops))
                ended, self.loops[place] = self.loops[place], Loop()
                ended.close()
            time.sleep(self.chance.uniform(0, 0.004))  # sleeps: random interleavings of threads
        for subject in self.subjects:  # somebody may be waiting for room in it
            if subject.is_held and not subject.is_closed:
                subject.release()

    def run(self, seconds: float) -> None:
        """Let all of it happen for some time, and then until nothing is left to do."""
        jobs: list[Callable[[], object]] = [lambda who=who: self._publish(who) for who in range(3)]  # type: ignore[misc]
        jobs.append(lambda: asyncio.run(self._publish_async(3)))
        jobs.append(self._meddle)
        joins = [in_background(job) for job in jobs]
        self._over.wait(seconds)
        self._over.set()
        for join in joins:
            join()

    def check(self) -> None:
        """Nobody waits for ever, nothing is left over, and each lane is as it should be."""
        everything = [*self.past, *self.subjects]
        self._hung.set()
        eventually(lambda: not self.pool.has_work, "nothing left to do")
        eventually(lambda: all(not len(each.lane) for each in everything), "the lanes empty")
        eventually(lambda: len(self.reached) == self.waited, "all told who wait")
        assert sorted(self.reached) == [*range(1, self.waited + 1)]
        eventually(lambda: self.pool.is_idle, "the supervisor gone")
        assert self.pool.threads == 0
        for subject in everything:
            subject.check()
        assert sum(len(each.seen) for each in everything) > 100


def _is_no_overflow(record: logging.LogRecord) -> bool:
    return "events behind" not in record.getMessage()

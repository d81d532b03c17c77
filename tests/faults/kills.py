"""Kills runs at seeded moments until they are done, and compares what they leave with a run that nobody disturbed.

    nice python tests/faults/kills.py --rounds=50 | tee tests/faults/kills.txt

Even rounds have one process, odd ones two. A moment is a CPU second of the run's life, which no other load moves, or a
mark that the run passes. The tests run a few rounds of the same.
"""

import argparse
import collections
import pathlib
import random
import signal
import sys
import tempfile

from harness import (
    COMPILED,
    DONE,
    EVALUATED,
    PREPARED,
    REPORTING,
    RESTORED,
    SAVED,
    SAVING,
    STEPPING,
    Run,
    assert_same_run,
    learned_rows,
    train,
)

MARKS = {
    "preparing": PREPARED,
    "restored": RESTORED,
    "compiled": COMPILED,
    "stepping": STEPPING,
    "saving": SAVING,
    "saved": SAVED,
    "evaluated": EVALUATED,
    "reporting": REPORTING,
}


def kill_until_done(workdir: pathlib.Path, seed: int, life: float, *, processes: int, kills: int) -> list[str]:
    """Trains in `workdir`, killed up to `kills` times, then undisturbed. Returns what each life had reached at its end.

    Of two processes now both are killed, now one, which ends the other. `life`: CPU seconds of an undisturbed run.
    """
    rng, ends = random.Random(seed), []
    while len(ends) < kills:
        with Run(workdir, processes=processes) as run:
            mark, second, pause = rng.choice(list(MARKS)), rng.uniform(0, life), rng.uniform(0, life / 30)
            moment = MARKS[mark] if rng.random() < 0.6 else after(run, second)
            if run.wait_for(moment, or_end=True):
                run.wait_for(after(run, run.cpu_seconds() + pause), or_end=True)
            run.send(signal.SIGKILL, rng.choice([None, None, 0, 1]) if processes > 1 else None)
            codes = run.end()
            assert set(codes) <= {-signal.SIGKILL, 0, 6}, (codes, run.outputs())
            ends.append("done" if run.reached(DONE) and not any(codes) else reached(run))
            if ends[-1] == "done":
                return ends
    train(workdir, processes=processes)
    return [*ends, "done"]


def after(run: Run, second: float):
    return lambda: run.cpu_seconds() >= second


def reached(run: Run) -> str:
    """The last mark that a life has passed."""
    return ([name for name, mark in MARKS.items() if run.reached(mark)] or ["importing"])[-1]


def undisturbed(folder: pathlib.Path, processes: int) -> tuple[pathlib.Path, float]:
    """(workdir, CPU seconds) of a run that nobody disturbs, its programs compiled before."""
    train(folder / f"first-{processes}", processes=processes)
    workdir, seconds = folder / f"undisturbed-{processes}", 0.0
    with Run(workdir, processes=processes) as run:

        def over() -> bool:
            nonlocal seconds
            seconds = max(seconds, run.cpu_seconds())
            return all(process.poll() is not None for process in run.processes)

        run.wait_for(over, or_end=True)
        assert not any(run.end()), run.outputs()
    return workdir, seconds


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--kills", type=int, default=6, help="at most, in each round")
    options = parser.parse_args()
    counts = collections.Counter()
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        expected = {processes: undisturbed(folder, processes) for processes in (1, 2)}
        for seed in range(options.rounds):
            processes = 1 + seed % 2
            whole, life = expected[processes]
            workdir = folder / f"run-{seed}"
            ends = kill_until_done(workdir, seed, life, processes=processes, kills=options.kills)
            assert_same_run(workdir, whole)
            counts.update(ends)
            print(f"round {seed}: {processes} process(es), lives ended {', '.join(ends)}; the same", flush=True)
        rows = len(learned_rows(whole))
    lives = sum(counts.values())
    print(f"{options.rounds} rounds, {lives} lives, {lives - counts['done']} of them killed: ", end="")
    print(", ".join(f"{number} {end}" for end, number in counts.most_common()))
    print(f"every run left the arrays of an undisturbed one bit for bit, and its {rows} rows (times aside)")


if __name__ == "__main__":
    sys.exit(main())

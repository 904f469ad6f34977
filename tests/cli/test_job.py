"""What follows from the reports of the ranks."""

from __future__ import annotations

import signal

import pytest

from mpdist.cli.job import Job, Verdict, describe, ranks_text, shell_status

EXIT_3 = 3 << 8
EXIT_14 = 14 << 8  # as Open MPI ends a rank whose connection was closed
KILLED = int(signal.SIGKILL)
GOOD_RECORDS = ("used", "open", "done")


def job_of(*ends: tuple[int | None, tuple[str, ...], bool]) -> Job:
    """A job whose ranks ended in this order: wait status, records, by itself."""
    job = Job(len(ends))
    for number, (status, records, by_itself) in enumerate(ends):
        rank = job.started(number, 100 + number, "h")
        for word in records:
            job.recorded(rank, word)
        if status is not None:
            job.ended(rank, status, by_itself)
    return job


GOOD = (0, GOOD_RECORDS, True)
PLAIN = (0, (), True)
LOST = (None, ("used",), True)
STOPPED = (int(signal.SIGKILL), ("used",), False)


@pytest.mark.parametrize("end", [GOOD, PLAIN])
def test_success_needs_every_rank_and_the_launcher(end: tuple[int, tuple[str, ...], bool]) -> None:
    assert job_of(end, end).verdict(0) == Verdict(0)
    assert job_of(end, end).verdict(5).status == 5
    assert job_of(end, LOST).verdict(0).status == 1


@pytest.mark.parametrize(
    ("wait_status", "records", "status", "words"),
    [
        (0, ("used",), 1, "left with exit status 0, as by os._exit(0), before the job was agreed"),
        (
            EXIT_3,
            ("used", "open"),
            3,
            "left with exit status 3 before the job was agreed to be finished (MPDIST_DEBUG=1 may say why)",
        ),
        (
            EXIT_3,
            ("used",),
            3,
            "left with exit status 3 while it started mpdist (what it printed says why); the job is",
        ),
        (EXIT_3, (), 3, "left with exit status 3 before it started mpdist (what it printed says why); the job is"),
        (EXIT_3, GOOD_RECORDS, 3, "after the job was agreed to be finished"),
        (int(signal.SIGKILL), (), 137, "was killed by SIGKILL (perhaps by the kernel, for want of memory)"),
        (40, (), 168, "was killed by signal 40; the job is stopped"),
        (int(signal.SIGSEGV) | 128, ("used",), 139, "was killed by SIGSEGV before the job was agreed"),
    ],
)
@pytest.mark.parametrize("launcher_status", [0, 1, 9, -15])
def test_first_failed_rank_decides_and_is_named(
    wait_status: int, records: tuple[str, ...], status: int, words: str, launcher_status: int
) -> None:
    verdict = job_of(STOPPED, (wait_status, records, True), (EXIT_3 + 256, (), True)).verdict(launcher_status)
    assert verdict.status == status
    assert len(verdict.lines) == 1
    assert verdict.lines[0].startswith("mpdist: rank 1 of 3 (host h, pid 101) ")
    assert words in verdict.lines[0]


@pytest.mark.parametrize(
    ("ends", "cause"),
    [
        ([(EXIT_14, ("used",), True), (KILLED, ("used",), True)], 1),
        ([(KILLED, ("used",), True), (EXIT_14, ("used",), True)], 0),
        ([(EXIT_14, ("used",), True), (EXIT_3, ("used",), True)], 0),
        ([(KILLED, (), True), (int(signal.SIGSEGV), (), True)], 0),
        ([(EXIT_14, ("used", "told"), True), (KILLED, ("used",), True)], 0),
        ([(EXIT_14, ("used",), True), STOPPED], 0),
    ],
)
def test_the_first_is_the_cause_but_one_that_was_killed_before_its_victims(
    ends: list[tuple[int, tuple[str, ...], bool]], cause: int
) -> None:
    job = job_of(*ends)
    assert job.cause is job.ranks[cause]


def test_rank_that_has_explained_itself_is_the_cause_without_a_line() -> None:
    assert job_of(STOPPED, (EXIT_3, ("used", "told"), True)).verdict(1) == Verdict(3)
    assert job_of((None, ("used", "told"), True), STOPPED).verdict(42) == Verdict(42)
    assert job_of((None, ("told",), True)).verdict(0) == Verdict(1)


def test_rank_that_left_without_mpdist_while_others_start_it_is_the_cause() -> None:
    job = job_of(PLAIN, (None, ("init", "used"), True))
    assert job.blame_absent()
    job.ended(job.ranks[1], KILLED, by_itself=False)
    assert job.verdict(0) == Verdict(
        1,
        [
            "mpdist: rank 0 of 2 (host h, pid 100) left with exit status 0 and has never started mpdist, for which the "
            "others wait; the job is stopped"
        ],
    )


@pytest.mark.parametrize("other", [(None, (), True), (None, ("init", "open"), True), PLAIN, (EXIT_3, ("init",), True)])
def test_nobody_waits_for_a_rank_that_left_without_mpdist(other: tuple[int | None, tuple[str, ...], bool]) -> None:
    assert not job_of(PLAIN, other).blame_absent()


def test_explanation_counts_before_a_later_end_of_another_rank() -> None:
    job = job_of((None, ("used", "told"), True), (EXIT_3, ("used",), True))
    assert job.verdict(7) == Verdict(7)


@pytest.mark.parametrize(("launcher_status", "status"), [(0, 1), (42, 42), (-9, 137)])
def test_ranks_lost_without_a_cause_are_listed(launcher_status: int, status: int) -> None:
    verdict = job_of(LOST, PLAIN, STOPPED).verdict(launcher_status)
    assert verdict.status == status
    assert "ranks 0, 2 of 3 did not finish" in verdict.lines[0]
    assert "rank 1 had left with exit status 0" in verdict.lines[0]


def test_host_that_was_not_heard_again_is_named() -> None:
    job = job_of(LOST, STOPPED, LOST)
    assert "(MPI_Abort, a lost host, or a signal)" in job.verdict(1).lines[0], "there is one host"
    job.ranks[0].host = job.ranks[2].host = "b"
    assert "(MPI_Abort, a lost host, perhaps b, or a signal)" in job.verdict(1).lines[0]


def test_reader_of_the_output_that_has_had_enough_ends_the_job_silently() -> None:
    assert job_of(STOPPED, LOST).verdict(-signal.SIGPIPE) == Verdict(141)
    assert job_of((EXIT_3, ("used",), True), LOST).verdict(-signal.SIGPIPE).status == 3


def test_job_that_never_started_is_not_a_success() -> None:
    assert Job(2).verdict(0).status == 1
    assert "started no rank" in Job(2).verdict(0).lines[0]


def test_signal_to_the_job_decides_over_what_it_led_to() -> None:
    job = job_of((EXIT_3, ("used",), True), GOOD)
    job.interrupted_by = signal.SIGINT
    assert job.verdict(1) == Verdict(130, ["mpdist: the job was stopped by SIGINT"])


def test_job_is_over_when_every_rank_has_reported_its_end() -> None:
    assert job_of(GOOD, STOPPED).is_over
    assert not job_of(GOOD, LOST).is_over
    assert not Job(1).is_over


@pytest.mark.parametrize(
    ("ranks", "text"),
    [([3], "rank 3"), ([0, 1, 2], "ranks 0-2"), ([5, 0, 2, 1], "ranks 0-2, 5"), ([0, 2], "ranks 0, 2")],
)
def test_ranks_are_written_as_spans(ranks: list[int], text: str) -> None:
    assert ranks_text(ranks) == text


def test_process_ends_are_described() -> None:
    assert (describe(3), describe(-9)) == ("returned 3", "was killed by SIGKILL")
    assert describe(-40) == "was killed by signal 40"
    assert (shell_status(3), shell_status(-9)) == (3, 137)

"""How a job ends well: all ranks agree, then it returns 0, and says nothing."""

from __future__ import annotations

import pytest
from cli.jobs import PROMISED_SECONDS
from runtime.programs import CHILDREN, ENDING, report, run

pytestmark = pytest.mark.job

# From the launch to the first line of the program, on a busy machine.
START_SECONDS = 5.0

ENDINGS = [
    "various", "loop", "finalize", "late", "needed", "left", "mpi4py_first", "mpi4py_later", "many_tags", "seen_task",
    "forgotten_task_of_another_loop", "before", "many_files", "exits", "beside",
    "thread_that_waits", "finalize_in_threads", "iterator_in_a_thread", "sends_after_finalize",
]  # fmt: skip


@pytest.mark.parametrize("how", ENDINGS)
def test_job_ends_with_zero(how: str) -> None:
    ended = run("bare", 3, ENDING, how)
    assert (ended.status, ended.err) == (0, "")


@pytest.mark.parametrize("how", ["dup_that_timed_out", "subgroup_that_timed_out"])
def test_job_of_two_ranks_ends_with_zero(how: str) -> None:
    """They agree that all is over in one step, after which the last to come looks no more."""
    ended = run("bare", 2, ENDING, how)
    assert (ended.status, ended.err) == (0, "")


@pytest.mark.parametrize("how", ["finalize", "late"])
def test_job_has_a_completion_record_under_mpdist_run(how: str) -> None:
    """And no rank is lost that takes longer."""
    ended = run("mpdist", 3, ENDING, how)
    assert (ended.status, ended.err) == (0, "")
    assert ended.out.count("the last rank is done") == (how == "late")


def test_one_launched_rank_ends_with_zero() -> None:
    ended = run("bare", 1, ENDING, "various")
    assert (ended.status, ended.err) == (0, "")


def test_messages_that_nobody_received_are_reported() -> None:
    ended = run("bare", 2, ENDING, "unclaimed")
    assert ended.status == 0
    assert "'world' (rank 1 of 2) ends with 1 message that nobody received: float64 x 3 from rank 0" in ended.err


def test_message_that_nobody_will_receive_ends_the_job() -> None:
    ended = run("bare", 2, ENDING, "lost_send")
    assert ended.status == 1
    assert "rank 1 waits in send to 0, tag 3" in ended.err
    assert "(the end of its program, in the final drain)" in ended.err


def test_closed_stderr_and_a_folder_that_is_gone_keep_nobody_from_being_told() -> None:
    ended = run("bare", 2, ENDING, "nowhere", environ={"MPDIST_REPORT_AFTER": "0.3"})
    assert ended.status == 1
    assert "mpdist: rank 0 (" in ended.err
    assert f"on 'world' (rank 0 of 2) ({ENDING}:" in ended.err
    assert "for rank 1, which has finished; the job is stopped" in ended.err


def test_daemon_thread_does_not_count_and_is_named() -> None:
    ended = run("bare", 2, ENDING, "daemon")
    assert ended.status == 1
    assert "which has finished; the daemon threads of rank 1 do not count: join 'server'; the job" in report(ended)


def test_daemon_threads_that_communicate_at_the_end_do_no_harm() -> None:
    ended = run("mpdist", 2, ENDING, "servants")
    assert ended.status == 0, ended.err
    assert "AssertionError" not in ended.err


def test_message_that_a_thread_waits_for_in_vain_ends_the_job() -> None:
    ended = run("bare", 2, ENDING, "lost_receive")
    assert ended.status == 1
    line = report(ended)
    assert "rank 1 waits in recv from 0, tag 3 on 'world'" in line
    assert "for rank 0, which has finished" in line
    assert ended.seconds < START_SECONDS + PROMISED_SECONDS


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        (
            "crossed",
            "rank 0 waits in recv from 1, tag 4 on 'world' ({}) for rank 1, which has finished (and sends tag 3)",
        ),
        (
            "crossed_at_the_end",
            "rank 1 waits in send to 0, tag 3 on 'world' ({}) for rank 0, which has finished (and receives tag 4)",
        ),
    ],
)
def test_message_of_another_tag_ends_the_job(how: str, reason: str) -> None:
    ended = run("bare", 2, ENDING, how)
    assert ended.status == 1
    before, after = reason.split("{}")
    line = report(ended)
    assert before in line
    assert after in line
    assert ended.seconds < START_SECONDS + PROMISED_SECONDS


def test_messages_in_a_communicator_that_was_left_are_waited_for_by_nobody() -> None:
    ended = run("bare", 2, ENDING, "left_with_sends")
    assert ended.status == 0
    told = (
        "'world/dup1' (rank 1 of 2) is closed with 1 messages that nobody received: int64 x 4194304 from rank 0, tag 1"
    )
    assert ended.err.splitlines() == [f"mpdist: {told}"]


def test_wait_for_a_collective_that_others_have_left_ends_the_job() -> None:
    ended = run("bare", 2, ENDING, "left_by_others")
    assert ended.status == 1
    line = report(ended)
    assert "rank 0 waits in all_reduce float64 x 4194304 sum #2 on 'world/dup1'" in line
    assert "for rank 1, which has finished (has closed it after collective #1)" in line
    assert ended.seconds < START_SECONDS + PROMISED_SECONDS


def test_forgotten_task_that_has_failed_ends_the_job() -> None:
    """asyncio never reports a task to which the program still refers."""
    ended = run("bare", 2, ENDING, "forgotten_task")
    assert ended.status == 1
    assert "rank 1 of 2" in report(ended)
    assert "ValueError: boom (in task 'loader'); the job is stopped" in report(ended)
    assert ended.err.index("Traceback") < ended.err.index("mpdist: ")


def test_progress_thread_advances_operations_while_python_computes() -> None:
    ended = run("bare", 2, ENDING, "progress_thread", environ={"MPDIST_PROGRESS_THREAD": "1"})
    assert (ended.status, ended.err) == (0, "")


def test_wrong_variable_is_refused_on_all_ranks() -> None:
    ended = run("bare", 2, ENDING, "loop", environ={"MPDIST_DEBUG": "perhaps"})
    assert ended.status != 0
    assert "UsageError: environment variable MPDIST_DEBUG='perhaps' is not valid" in ended.err


@pytest.mark.parametrize("how", ["forks", "mpi4py_forks", "ended_at_once", "pools", "spawned"])
def test_child_processes_do_no_harm(how: str) -> None:
    ended = run("bare", 2, CHILDREN, how)
    assert ended.status == 0, ended.err
    assert "AssertionError" not in ended.err
    assert ended.out.count("added") == 2
    assert "mpdist: " not in ended.err


def test_data_loader_workers_do_no_harm() -> None:
    pytest.importorskip("torch")
    ended = run("bare", 2, CHILDREN, "dataloader")
    assert (ended.status, ended.err) == (0, "")

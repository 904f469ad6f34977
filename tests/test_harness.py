"""The harness: what it reports when tests pass, fail, hang or die on some of the ranks."""

from __future__ import annotations

from pathlib import Path
from textwrap import dedent

import psutil
import pytest
from ranks.verdict import Record, judge

# Each starts several launches; with Open MPI a launch takes a second at rest.
pytestmark = [pytest.mark.job, pytest.mark.any_mpi, pytest.mark.limit(240)]

INI = """
[pytest]
asyncio_mode = auto
asyncio_default_test_loop_scope = session
asyncio_default_fixture_loop_scope = session
"""
HEAD = """
import asyncio, ctypes, os, signal, sys, threading, time, warnings
import pytest
pytestmark = [pytest.mark.ranks(2)]

def world():
    from mpi4py import MPI
    return MPI.COMM_WORLD

if "--ranks-inner" in sys.argv:
    world()  # so that its start counts in no test's time
"""


class Suite:
    """Test files in one folder that are run by a pytest of their own."""

    def __init__(self, pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent), prepend=":")
        self._pytester = pytester
        pytester.makeini(INI)
        pytester.makeconftest('pytest_plugins = ["ranks.plugin"]')

    def run(self, text: str, *arguments: str) -> pytest.RunResult:
        self._pytester.makepyfile(test_it=HEAD + dedent(text))
        return self.again(*arguments)

    def add(self, name: str, text: str) -> None:
        """One more file beside it."""
        path = self._pytester.path / f"{name}.py"
        path.parent.mkdir(exist_ok=True)
        path.write_text(HEAD + dedent(text))

    def fixtures(self, folder: str) -> None:
        """A conftest.py in that folder."""
        (self._pytester.path / folder / "conftest.py").write_text("")

    def again(self, *arguments: str) -> pytest.RunResult:
        return self._pytester.runpytest_subprocess("-v", *arguments, timeout=100)

    def selected(self, *arguments: str) -> set[str]:
        """Names of the tests that would run."""
        result = self._pytester.runpytest_subprocess("--collect-only", "-q", *arguments, timeout=100)
        return {line.partition("::")[2] for line in result.outlines if "::" in line}


@pytest.fixture
def suite(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> Suite:
    return Suite(pytester, monkeypatch)


def test_each_test_runs_on_each_number_of_ranks_with_its_parameters(suite: Suite) -> None:
    result = suite.run("""
        pytestmark = pytest.mark.ranks(1, 3)

        @pytest.mark.parametrize("x", [5, 7])
        def test_sum(x):
            assert world().allreduce(x) == x * world().size

        class TestClass:
            def test_method(self):
                assert world().size in (1, 3)

        def test_one_launch_per_group():
            assert world().allreduce(0) == 0
            world().barrier()
    """)
    result.assert_outcomes(passed=8)
    names = [line.split(" ")[0] for line in result.stdout.lines if "::" in line]
    assert names.count("test_it.py::test_sum[5][1") == 1
    result.stdout.fnmatch_lines(["*test_sum[[]7][[]1 rank]*", "*test_method[[]1 rank]*", "*test_sum[[]7][[]3 ranks]*"])


def test_a_group_is_launched_once(suite: Suite) -> None:
    suite.run("""
        def test_a():
            print(world().rank, "is", os.getpid())
            assert False

        def test_b():
            print(world().rank, "is", os.getpid())
            assert False
    """).assert_outcomes(failed=2)
    lines = [line for line in suite.again().stdout.lines if " is " in line]
    assert len(lines) == 4
    assert len(set(lines)) == 2


TELLS_ITS_PROCESS = """
    def test_it():
        print(world().rank, "of", __name__, "is", os.getpid())
        assert False
"""


def processes(result: pytest.RunResult) -> dict[str, set[str]]:
    """Of each file the processes in which its test ran."""
    result.assert_outcomes(failed=3)
    lines = [line for line in result.stdout.lines if " is " in line]
    return {name: {line.split()[-1] for line in lines if name in line} for name in ("first", "other", "third")}


def test_files_of_a_folder_share_a_launch_unless_one_is_to_be_apart(suite: Suite) -> None:
    suite.add("test_first", TELLS_ITS_PROCESS)
    apart = "pytestmark = [pytest.mark.ranks(2), pytest.mark.apart]\n"
    suite.add("test_other", apart + dedent(TELLS_ITS_PROCESS))
    suite.add("test_third", TELLS_ITS_PROCESS)
    of = processes(suite.again())
    assert of["first"] == of["third"]
    assert not of["first"] & of["other"]


def test_folders_share_a_launch_unless_one_has_fixtures_of_its_own(suite: Suite) -> None:
    for folder in ("first", "other", "third"):
        suite.add(f"{folder}/test_{folder}", TELLS_ITS_PROCESS)
    suite.fixtures("other")
    of = processes(suite.again())
    assert of["first"] == of["third"]
    assert not of["first"] & of["other"]


def test_tests_without_the_mark_run_in_the_outer_process(suite: Suite) -> None:
    result = suite.run("""
        pytestmark = []

        def test_plain():
            assert "mpi4py" not in sys.modules

        @pytest.mark.limit(0.2)
        def test_slow():
            time.sleep(20)
    """)
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(["*no result within 0.2 s*"])


def test_a_failure_on_one_rank_names_it_and_shows_traceback_and_output(suite: Suite) -> None:
    result = suite.run("""
        def test_fail():
            print("this is rank", world().rank)
            assert world().rank != 1, "not here"
    """)
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        ["rank 1 failed: AssertionError: not here", ">*assert world().rank != 1*", "this is rank 1"]
    )


def test_a_failure_on_all_ranks_is_shown_once(suite: Suite) -> None:
    result = suite.run("""
        @pytest.fixture
        def broken():
            raise ValueError("broken fixture")

        def test_fail(broken):
            pass
    """)
    result.stdout.fnmatch_lines(["ranks 0, 1 failed: ValueError: broken fixture", "in setup:"])
    assert result.stdout.str().count('raise ValueError("broken fixture")') == 1


def test_a_failure_comes_before_the_hang_that_it_causes_and_the_rest_still_runs(suite: Suite) -> None:
    result = suite.run("""
        def test_fail():
            assert world().rank != 1, "the cause"
            world().barrier()

        def test_next():
            assert world().allreduce(1) == 2
    """)
    result.assert_outcomes(failed=1, passed=1)
    result.stdout.fnmatch_lines(
        ["rank 1 failed: AssertionError: the cause", "rank 0: no result*test_it.py:14 in test_fail"]
    )


def test_a_hang_is_named_with_rank_and_line_and_the_rest_still_runs(suite: Suite) -> None:
    result = suite.run("""
        @pytest.mark.limit(1)
        def test_hang():
            if world().rank == 1:
                time.sleep(100)

        def test_next():
            assert world().allreduce(1) == 2
    """)
    result.assert_outcomes(failed=1, passed=1)
    result.stdout.fnmatch_lines(["rank 1: no result within 1 s, at test_it.py:15 in test_hang", "*time.sleep(100)"])
    assert "rank 0: no result" not in result.stdout.str()


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
def test_a_hang_in_an_await_is_named_with_the_line_that_waits(suite: Suite, loop: str) -> None:
    result = suite.run(
        """
        @pytest.mark.limit(1)
        async def test_hang():
            await helper()

        async def helper():
            await asyncio.sleep(100)
    """,
        f"--loop={loop}",
    )
    result.stdout.fnmatch_lines(["ranks 0, 1: no result within 1 s, at test_it.py:17 in helper", "*await helper()"])


def test_a_hang_in_c_code_beside_many_threads_is_named_with_the_line_that_waits(suite: Suite) -> None:
    result = suite.run("""
        @pytest.mark.limit(1)
        def test_hang():
            for _ in range(150):
                threading.Thread(target=threading.Event().wait, daemon=True).start()
            mutex, lock = ctypes.create_string_buffer(64), ctypes.PyDLL(None).pthread_mutex_lock
            while True:  # the second call holds the interpreter's lock and never returns
                lock(mutex)
    """)
    result.stdout.fnmatch_lines(["ranks 0, 1: no result within 1 s, at test_it.py:18 in test_hang"])


def test_a_killed_rank_is_named_and_the_rest_still_runs(suite: Suite) -> None:
    result = suite.run("""
        def test_before():
            assert world().allreduce(1) == 2

        def test_die():
            if world().rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            world().barrier()

        def test_next():
            assert world().allreduce(1) == 2
    """)
    result.assert_outcomes(passed=2, failed=1)
    result.stdout.fnmatch_lines(["rank 1 ended in the middle of the test", "*[Ss]ignal 9*"])


def test_nothing_is_left_running(suite: Suite, tmp_path: Path) -> None:
    suite.run(f"""
        import subprocess, sys

        @pytest.mark.limit(1)
        def test_hang():
            child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"], start_new_session=True)
            for pid in (os.getpid(), child.pid):
                open({str(tmp_path)!r} + f"/{{pid}}", "w").close()
            if world().rank == 1:
                os.kill(os.getpid(), signal.SIGSTOP)
            world().barrier()
    """).assert_outcomes(failed=1)
    pids = [int(path.name) for path in tmp_path.iterdir() if path.name.isdigit()]
    assert len(pids) == 4
    assert not any(psutil.pid_exists(pid) for pid in pids)


def test_a_launch_that_ends_badly_is_an_error(suite: Suite) -> None:
    result = suite.run("""
        import atexit

        def test_pass():
            atexit.register(os._exit, 7)
    """)
    result.assert_outcomes(passed=1, errors=1)
    result.stdout.fnmatch_lines(["all tests passed, but the launch ended with status 7"])


def test_a_rank_that_cannot_import_the_tests_says_so(suite: Suite) -> None:
    result = suite.run("""
        if "--ranks-inner" in sys.argv:
            import no_such_module

        def test_a():
            pass
    """)
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["rank ? could not collect the tests", "*no_such_module*"])


def test_skips_and_expected_failures_keep_their_meaning(suite: Suite) -> None:
    result = suite.run("""
        @pytest.mark.skip(reason="by mark")
        def test_skip_mark(): pass

        def test_skip_inside(): pytest.skip("by the test")

        @pytest.mark.xfail(reason="known")
        def test_xfail(): assert False

        @pytest.mark.xfail(strict=True)
        def test_xpass_strict(): pass

        @pytest.mark.large
        def test_large(): pass

        def test_skip_on_one_rank():
            if world().rank == 1:
                pytest.skip("only there")

        def test_warns(): warnings.warn("look at this")
    """)
    result.assert_outcomes(skipped=3, xfailed=1, failed=2, passed=1, warnings=2)
    result.stdout.fnmatch_lines(
        ["the ranks disagree: rank 0 passed, rank 1 skipped", "*rank 1: UserWarning: look at this"]
    )


def test_async_tests_run_in_one_loop_of_each_kind(suite: Suite) -> None:
    result = suite.run("""
        pytestmark = [pytest.mark.ranks(1, 2), pytest.mark.loops]
        loops = set()

        async def test_one():
            loops.add(asyncio.get_running_loop())

        async def test_two():
            loops.add(asyncio.get_running_loop())
            assert len({loop for loop in loops if not loop.is_closed()}) == 1
    """)
    result.assert_outcomes(passed=8)
    result.stdout.fnmatch_lines(["*test_one[[]uvloop][[]2 ranks] PASSED*"])
    suite.again("--loop=uvloop", "--ranks=2").assert_outcomes(passed=2)


def test_selection_by_id_keyword_and_last_failure(suite: Suite) -> None:
    suite.run("""
        pytestmark = pytest.mark.ranks(1, 2)

        def test_a():
            assert world().size == 1

        def test_b():
            pass
    """).assert_outcomes(passed=3, failed=1)
    suite.again("--lf").assert_outcomes(failed=1)
    suite.again("test_it.py::test_a[2 ranks]").assert_outcomes(failed=1)
    assert suite.selected("-k", "test_b", "--ranks=2") == {"test_b[2 ranks]"}
    assert suite.selected("-k", "test_b", "--each-on=most") == {"test_b[2 ranks]"}
    suite.again("-x").assert_outcomes(passed=2, failed=1)


def test_each_test_may_run_on_one_of_its_numbers_of_ranks(suite: Suite) -> None:
    text = """
        pytestmark = pytest.mark.ranks(1, 2, 3)

        @pytest.mark.parametrize("x", range(30))
        def test_one(x):
            pass
    """
    suite.run(text, "--each-on=one").assert_outcomes(passed=30)
    one, another = suite.selected("--each-on=one"), suite.selected("--each-on=another")
    assert len({name.rpartition("[")[0] for name in one}) == len(one) == 30
    assert {name.rpartition("[")[2] for name in one} == {"1 rank]", "2 ranks]", "3 ranks]"}
    assert len({name.rpartition("[")[0] for name in another}) == len(another) == 30
    assert not one & another
    assert suite.selected("--each-on=one") == one
    assert suite.selected("--each-on=one", "--ranks=2") == {f"test_one[{x}][2 ranks]" for x in range(30)}


def test_halves_of_what_either_mpi_serves_have_nothing_in_common_and_are_all(suite: Suite) -> None:
    text = """
        pytestmark = pytest.mark.ranks(1, 2)

        @pytest.mark.either_mpi
        @pytest.mark.parametrize("x", range(20))
        def test_one(x):
            pass

        def test_other():
            pass

        @pytest.mark.any_mpi
        @pytest.mark.either_mpi
        def test_other_without_mpi():
            pass
    """

    result = suite.run(text, "--half=first", "--ranks=1")
    result.assert_outcomes(passed=len(suite.selected("--half=first", "--ranks=1")))
    first, second = (suite.selected(f"--half={half}", "--each-on=one") for half in ("first", "second"))
    others = {name for name in first if not name.startswith("test_one[")}
    assert {name.rpartition("[")[0] for name in others} == {"test_other", "test_other_without_mpi"}
    assert first & second == others
    assert min(len(first), len(second)) > len(others)
    assert len((first | second) - others) == 20


def test_a_failed_example_of_hypothesis_is_shown_though_its_replay_hangs(suite: Suite) -> None:
    result = suite.run("""
        from hypothesis import given, settings, strategies

        failed = []

        @settings(derandomize=True, deadline=None, database=None)
        @given(x=strategies.integers())
        async def test_property(x):
            if failed:
                time.sleep(100)
            if world().rank == 1 and x > 10:
                failed.append(x)
                assert False, "too large"
    """)
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["rank 1 failed: AssertionError: too large*", "Falsifying example: *"])


def test_verdict_joins_ranks() -> None:
    passed, failed = Record(0, is_done=True), Record(1, outcomes={"call": "failed"}, texts={"call": "E   Boom: 1"})
    hung = Record(2, where={"stack": 'File "/t.py", line 3 in test_x\n', "pending": "recv from 1"})
    assert judge([passed], 60, "/t.py", "").outcome == "passed"
    verdict = judge([passed, failed, hung], 60, "/t.py", "")
    assert verdict.headline == "rank 1 failed: Boom: 1; rank 2: no result within 60 s, at t.py:3 in test_x"
    assert "recv from 1" in verdict.text

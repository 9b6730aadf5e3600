"""MPOpenAIAPI with worker processes, in scripts that guard nothing by `if __name__ == "__main__"`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from beam_llm.simulator import Script, SimulatorProcess

ROOT = Path(__file__).resolve().parent.parent


def run_script(folder: Path, text: str, script: Script) -> tuple[dict[str, Any], str]:
    """What a script prints as JSON, and its standard error; it is given a simulator's URL and a TMPDIR."""
    (folder / "spool").mkdir()
    (folder / "job.py").write_text(text)
    with SimulatorProcess(script) as simulator:
        environment = {
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "TMPDIR": str(folder / "spool"),
            "THE_KEY": "sk-plain-secret",
        }
        ran = subprocess.run(
            [sys.executable, "job.py", simulator.base_url],
            cwd=folder,
            env={**environment, "PYTHONWARNINGS": "ignore::FutureWarning"},
            capture_output=True,
            text=True,
            timeout=150,
        )
    assert ran.returncode == 0, ran.stderr
    found: dict[str, Any] = json.loads(ran.stdout)
    return found, ran.stderr


_TWO_JOBS = """
import json, os, sys, threading
from pathlib import Path
from PIL import Image
from beam_llm.compat import MPOpenAIAPI

KEY = os.environ.pop("THE_KEY")
seen = {"workers": set(), "leaks": set(), "spooled": 0, "rss": 0}
done = threading.Event()

def rss():
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

def watch():
    while not done.wait(0.02):
        seen["rss"] = max(seen["rss"], rss())
        for process in Path("/proc").iterdir():
            try:
                command = (process / "cmdline").read_text() if process.name.isdigit() else ""
                if KEY in command:
                    seen["leaks"].add(command)
                if "sdk_worker_main" in command and f"PPid:\\t{os.getpid()}\\n" in (process / "status").read_text():
                    seen["workers"].add(process.name)
            except OSError:
                pass

def look_for_key():
    for path in Path(os.environ["TMPDIR"]).rglob("*"):
        try:
            if path.is_file():
                seen["spooled"] += path.stat().st_size
                with path.open("rb") as file:
                    if any(KEY.encode() in piece for piece in iter(lambda: file.read(1 << 20), b"")):
                        seen["leaks"].add(str(path))
        except OSError:
            pass

pictures = [Image.new("RGB", (480, 480), (n % 256, n // 256, 9)) for n in range(300)]
api = MPOpenAIAPI("m", KEY, sys.argv[1], num_workers=2)
api.generate(["imports and connections are not what is measured"])
before = seen["rss"] = rss()
threading.Timer(2, look_for_key).start()
watcher = threading.Thread(target=watch)
watcher.start()
answers = api.generate([[picture, f"prompt {n}"] for n, picture in enumerate(pictures)])
done.set()
watcher.join()
second = api.generate([f"again {n}" for n in range(300)])
api.shutdown()
print(json.dumps({"answers": answers, "second": second, "growth": seen["rss"] - before, "leaks": sorted(seen["leaks"]),
    "workers": len(seen["workers"]), "spooled": seen["spooled"], "left": os.listdir(os.environ["TMPDIR"]),
    "failed": api.failed, "threads": [t.name for t in threading.enumerate() if "beam_llm" in t.name]}))
"""


@pytest.fixture(scope="module")
def two_jobs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the script found out: 300 pictures of 0.7 MB, then 300 texts, 2 worker processes."""
    found, errors = run_script(tmp_path_factory.mktemp("script"), _TWO_JOBS, Script(latency_ms=20))
    return {**found, "stderr": errors}


def test_worker_processes_answer_in_order_time_after_time(two_jobs: dict[str, Any]) -> None:
    assert two_jobs["answers"] == [f"prompt {n} [image PNG 480x480]" for n in range(300)]
    assert two_jobs["second"] == [f"again {n}" for n in range(300)]
    assert two_jobs["workers"] == 2
    assert two_jobs["failed"] == 0


def test_pictures_in_memory_are_not_copied_into_the_memory_of_the_process_that_has_them(
    two_jobs: dict[str, Any],
) -> None:
    assert two_jobs["growth"] < 60 * 2**20, "300 pictures are 207 MB"


def test_the_key_is_in_no_command_line_and_in_no_file(two_jobs: dict[str, Any]) -> None:
    assert two_jobs["spooled"] > 150 * 2**20, "the look at the files came too early or too late"
    assert two_jobs["leaks"] == []


def test_nothing_is_left_of_worker_processes_and_folders(two_jobs: dict[str, Any]) -> None:
    assert two_jobs["left"] == []
    assert two_jobs["threads"] == []


def test_a_script_sees_a_summary_and_nothing_of_beam(two_jobs: dict[str, Any]) -> None:
    # A slow machine may also see a line of progress, every 15 s.
    lines = [line for line in two_jobs["stderr"].splitlines() if " left; " not in line]
    assert [line.partition(";")[0] for line in lines] == [
        "beam_llm: 1 prompts: 1 succeeded, 0 failed",
        "beam_llm: 300 prompts: 300 succeeded, 0 failed",
        "beam_llm: 300 prompts: 300 succeeded, 0 failed",
    ]


_ENDINGS = """
import json, os, signal, sys, threading, time
from pathlib import Path
from beam_llm.compat import MPOpenAIAPI

endings = {}
signal.signal(signal.SIGINT, signal.default_int_handler)  # whoever runs the tests in the background has it ignored

def workers():
    found = []
    for process in filter(lambda one: one.name.isdigit(), Path("/proc").iterdir()):
        try:
            command, status = (process / "cmdline").read_text(), (process / "status").read_text()
            if "sdk_worker_main" in command and f"PPid:\\t{os.getpid()}\\n" in status:
                found.append(int(process.name))
        except OSError:
            pass
    return found

def ask(name, key):
    started = time.monotonic()
    try:
        with MPOpenAIAPI("m", key, sys.argv[1], num_workers=2, verbose=False) as api:
            api.generate([f"prompt {n}" for n in range(300)])
    except BaseException as error:
        endings[name] = {
            "error": [type(error).__name__, str(error)],
            "seconds": time.monotonic() - started,
            "workers": workers(),
            "left": os.listdir(os.environ["TMPDIR"]),
            "threads": [t.name for t in threading.enumerate() if "beam_llm" in t.name],
        }

def when_workers_are_there(act, wait_s):
    while len(found := workers()) < 2:
        time.sleep(0.02)
    time.sleep(wait_s)
    act(found)

def in_thread(function, *args):
    thread = threading.Thread(target=function, args=args)
    thread.start()
    return thread

in_thread(when_workers_are_there, lambda found: os.kill(found[0], signal.SIGKILL), 3)
in_thread(ask, "killed", os.environ["THE_KEY"]).join(60)
in_thread(ask, "bad key in a thread", "sk-wrong").join(60)
ask("bad key", "sk-wrong")
in_thread(when_workers_are_there, lambda found: os.kill(os.getpid(), signal.SIGINT), 0)
ask("Ctrl-C", os.environ["THE_KEY"])
print(json.dumps(endings))
"""


@pytest.fixture(scope="module")
def endings(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """How jobs came to an early end whose answers would have taken a minute."""
    script = Script(latency_ms=60_000, api_key="sk-plain-secret")
    found, errors = run_script(tmp_path_factory.mktemp("script"), _ENDINGS, script)
    return {**found, "stderr": errors}


_DOOMED = "20 requests in a row were refused by http://127.0.0.1:"


@pytest.mark.parametrize(
    ("name", "error", "message"),
    [
        ("killed", "WorkerDiedError", "a worker process died (Worker subprocess exited with return code "),
        ("bad key in a thread", "RunStoppedError", _DOOMED),
        ("bad key", "RunStoppedError", _DOOMED),
        ("Ctrl-C", "KeyboardInterrupt", ""),
    ],
)
def test_a_job_that_cannot_go_on_ends_at_once_and_leaves_nothing_behind(
    endings: dict[str, Any], name: str, error: str, message: str
) -> None:
    ending = endings[name]
    assert ending["error"][0] == error
    assert ending["error"][1].startswith(message)
    assert ending["seconds"] < 60
    assert (ending["workers"], ending["left"], ending["threads"]) == ([], [], [])


def test_of_early_ends_beam_says_nothing_that_the_error_does_not_say(endings: dict[str, Any]) -> None:
    assert "RunStoppedError" not in endings["stderr"]
    assert "DoFnRunner" not in endings["stderr"]

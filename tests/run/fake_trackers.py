"""Packages with the names of trackers, in a directory for PYTHONPATH. They record their calls and fail on demand.

`RATEL_FAKE_CALLS` names the file for the calls: one JSON list each. `RATEL_FAKE_TROUBLE` says what goes wrong and
where, such as `raise:log 2` or `hang:finish`. The real packages' calls that Ratel does not use are not there.
"""

from __future__ import annotations

import json
from pathlib import Path

CALLS, TROUBLE = "RATEL_FAKE_CALLS", "RATEL_FAKE_TROUBLE"
Call = list[object]

_COMMON = f'''
import json, os, sys, time

def call(name, *values):
    print("output of", name)
    where = f"{{name}} {{values[0]}}" if name == "log" else name
    trouble, _, place = os.environ.get("{TROUBLE}", "").partition(":")
    if place in (name, where):
        if trouble == "raise":
            raise RuntimeError("no route\\n  to the server")
        if trouble == "hang":
            time.sleep(1000)
        if trouble == "die":
            os._exit(7)
        if trouble == "slow":
            time.sleep(0.3)
        if trouble == "linger":
            import atexit
            atexit.register(time.sleep, 1000)
    with open(os.environ["{CALLS}"], "a") as file:
        file.write(json.dumps([name, *values]) + "\\n")
'''
_WANDB = """
from fake_tracker import call

class Run:
    dir = "wandb/offline-run"
    def __init__(self, id):
        self.id, self.url = id, f"https://wandb.example/{id}"
    def log(self, values, step):
        call("log", step, values)
    def finish(self):
        call("finish")

def init(**keywords):
    call("init", keywords)
    return Run(keywords["id"])
"""
_MLFLOW = """
import json, os
from fake_tracker import call

class Namespace:
    def __init__(self, **values):
        self.__dict__.update(values)

class MlflowClient:
    def get_metric_history(self, run_id, key):
        with open(os.environ["RATEL_FAKE_CALLS"]) as file:
            calls = [json.loads(line) for line in file]
        return [Namespace(step=call[1]) for call in calls if call[0] == "log"]

def set_experiment(name):
    call("experiment", name)
def start_run(**keywords):
    call("init", keywords)
    return Namespace(info=Namespace(run_id=keywords.get("run_id") or "f00d"))
def get_tracking_uri():
    return "file:///mlruns"
def log_params(values):
    call("params", values)
def log_metrics(values, step):
    call("log", step, values)
def end_run():
    call("finish")
"""
_TRACKIO = """
from fake_tracker import call

def init(**keywords):
    call("init", keywords)
def log(values, step):
    call("log", step, values)
def finish():
    call("finish")
"""
_MESSAGE = """
class Message:
    def __init__(self, **values):
        self.__dict__.update(values)
"""
_SESSION = "class SessionLog(Message): START = 1\n"
_WRITER = """
import os
from fake_tracker import call

class EventFileWriter:
    def __init__(self, directory, filename_suffix):
        self.directory = directory
        os.makedirs(directory, exist_ok=True)
        open(f"{directory}/events.out.tfevents.{os.getpid()}{filename_suffix}", "x").close()
    def add_event(self, event):
        if hasattr(event, "session_log"):
            call("init", {"directory": self.directory, "purged_from": event.step})
        else:
            call("log", event.step, {value.tag: value.simple_value for value in event.summary.value})
    def flush(self):
        pass
    def close(self):
        call("finish")
"""
_FILES = {
    "fake_tracker.py": _COMMON,
    "wandb/__init__.py": _WANDB,
    "mlflow/__init__.py": _MLFLOW,
    "trackio/__init__.py": _TRACKIO,
    "tensorboard/__init__.py": "",
    "tensorboard/compat/__init__.py": "",
    "tensorboard/compat/proto/__init__.py": "",
    "tensorboard/compat/proto/event_pb2.py": f"{_MESSAGE}class Event(Message): pass\n{_SESSION}",
    "tensorboard/compat/proto/summary_pb2.py": f"{_MESSAGE}class Summary(Message):\n    class Value(Message): pass\n",
    "tensorboard/summary/__init__.py": "",
    "tensorboard/summary/writer/__init__.py": "",
    "tensorboard/summary/writer/event_file_writer.py": _WRITER,
}


def write_packages(directory: Path) -> Path:
    """Write all packages."""
    for name, text in _FILES.items():
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return directory


def read_calls(path: Path) -> list[Call]:
    """The calls so far, in their order."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def logged(path: Path) -> list[object]:
    """The steps that were sent, in their order."""
    return [call[1] for call in read_calls(path) if call[0] == "log"]

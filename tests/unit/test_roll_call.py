"""Late hosts are named: what the thread of a process does, with the service and the GPU of a test."""

import dataclasses
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest

import jaxmoe
from jaxmoe.network import roll_call
from jaxmoe.network.roll_call import RollCall


class Service:
    """Texts by key, as JAX's service keeps them for all processes."""

    def __init__(self) -> None:
        self.texts: dict[str, str] = {}

    def key_value_set(self, key: str, value: str, allow_overwrite: bool) -> None:
        assert allow_overwrite
        self.texts[key] = value

    def key_value_dir_get(self, prefix: str) -> list[tuple[str, str]]:
        return [(key, value) for key, value in self.texts.items() if key.startswith(prefix)]


@dataclasses.dataclass
class Progress:
    enqueued: int
    waiting: int = 0
    waiting_seconds: float = 0.0
    device: int = 0


@pytest.fixture
def job(monkeypatch):
    """Three processes with one GPU each: how far they are, and what each does in a round."""
    monkeypatch.setattr(roll_call, "_told", [])
    service, progress = Service(), [Progress(4) for _ in range(3)]
    calls = [RollCall(service, lambda number=number: [progress[number]], number, 10.0, range(3)) for number in range(3)]

    def rounds() -> None:
        for call in calls:
            call.round()

    return progress, rounds


def test_nobody_is_late_while_launches_end_or_wait_for_less_than_the_limit(job):
    progress, rounds = job
    progress[0] = Progress(6, waiting=5, waiting_seconds=9.9)
    rounds()
    rounds()
    assert jaxmoe.failures() == ()


def test_processes_that_have_not_enqueued_a_launch_that_waits_are_named_once_each_launch(job, capfd):
    progress, rounds = job
    progress[0] = Progress(6, waiting=5, waiting_seconds=12)
    rounds()
    assert jaxmoe.failures() == ()  # the others may not have told yet that they have come
    rounds()
    rounds()
    [text] = jaxmoe.failures()
    assert "launch 5 of a layer on GPU 0 of process 0 has waited 12 s" in text
    assert "process 1 on " in text
    assert "process 2 on " in text
    assert text.count("(has started 4)") == 2
    assert capfd.readouterr().err.count("jaxmoe: launch 5") == 1
    with pytest.raises(jaxmoe.LayerFailedError, match="has waited 12 s"):
        jaxmoe.raise_if_failed()


def test_a_process_that_has_come_as_far_is_not_late_and_a_launch_that_all_have_is_nobodys_fault(job):
    progress, rounds = job
    rounds()
    progress[0] = Progress(6, waiting=5, waiting_seconds=12)
    progress[1] = Progress(5, waiting=5, waiting_seconds=1)
    rounds()
    rounds()
    [text] = jaxmoe.failures()
    assert "process 1 on" not in text
    roll_call._told.clear()
    progress[2] = Progress(7)
    progress[0] = Progress(7, waiting=7, waiting_seconds=12)
    progress[1] = Progress(7, waiting=7, waiting_seconds=12)
    rounds()
    rounds()
    assert jaxmoe.failures() == ()


def test_the_slowest_gpu_of_a_process_says_how_far_it_is(monkeypatch):
    monkeypatch.setattr(roll_call, "_told", [])
    service = Service()
    RollCall(service, lambda: [Progress(9), Progress(3, device=1)], 1, 10.0, ()).round()
    call = RollCall(service, lambda: [Progress(9, waiting=5, waiting_seconds=30)], 0, 10.0, [0, 1])
    call.round()
    call.round()
    assert "process 1" in roll_call.told()[0]
    assert "(has started 3)" in roll_call.told()[0]


def test_a_process_that_has_told_nothing_is_late(monkeypatch):
    monkeypatch.setattr(roll_call, "_told", [])
    call = RollCall(Service(), lambda: [Progress(1, waiting=1, waiting_seconds=30)], 0, 10.0, [0, 1])
    call.round()
    call.round()
    [text] = jaxmoe.failures()
    assert "Late are process 1 (has told nothing: it may not have begun a layer)." in text


def test_a_process_of_a_host_without_a_name_has_told_how_far_it_is(monkeypatch):
    monkeypatch.setattr(roll_call, "_told", [])
    monkeypatch.setattr(roll_call.platform, "node", lambda: "")
    service = Service()
    RollCall(service, lambda: [Progress(4)], 1, 10.0, ()).round()
    call = RollCall(service, lambda: [Progress(4, waiting=4, waiting_seconds=30)], 0, 10.0, [0, 1])
    assert call.late(4) == {}
    assert "(has started 4)" in call.late(5)[1]


def test_processes_that_a_launch_cannot_wait_for_are_not_named(monkeypatch):
    monkeypatch.setattr(roll_call, "_told", [])
    service = Service()
    progress = [Progress(10, waiting=9, waiting_seconds=70), Progress(8), Progress(4), Progress(4)]
    groups = [{0, 1}, {0, 1}, {2, 3}, {2, 3}]  # stages of a pipeline: the second one has half the layers
    calls = [
        RollCall(service, lambda number=number: [progress[number]], number, 60.0, processes)
        for number, processes in enumerate(groups)
    ]
    for call in [*calls, *calls]:
        call.round()
    [text] = jaxmoe.failures()
    assert "process 1 on " in text
    assert "process 2" not in text
    assert "process 3" not in text


def test_a_launch_may_wait_for_the_processes_of_its_group_or_where_devices_are_unknown_for_all(monkeypatch):
    monkeypatch.setattr(jax, "process_index", lambda: 2)
    monkeypatch.setattr(jax, "process_count", lambda: 5)
    groups = [
        [SimpleNamespace(process_index=number) for number in group] for group in ((0, 0, 1), (3, 2, 2), (2, 2, 2))
    ]
    assert roll_call.processes_of(np.array(groups)) == {2, 3}
    assert roll_call.processes_of(None) == {0, 1, 2, 3, 4}


def test_layers_traced_later_add_the_processes_that_they_wait_for_to_one_thread(monkeypatch):
    begun: list[Any] = []

    def thread(target: Any, **_: Any) -> Any:
        begun.append(target.__self__)
        return SimpleNamespace(start=lambda: None)

    monkeypatch.setattr(roll_call, "threading", SimpleNamespace(Thread=thread))
    monkeypatch.setattr(roll_call, "_client", Service)
    monkeypatch.setattr(roll_call, "native", SimpleNamespace(extension=lambda _: SimpleNamespace(progress=list)))
    roll_call._begun.cache_clear()
    roll_call.begin(7.0, {0, 1})
    roll_call.begin(7.0, {0, 3})
    roll_call._begun.cache_clear()
    [call] = begun
    assert call.processes == {0, 1, 3}


def test_the_thread_ends_with_the_service_and_says_so(monkeypatch, capfd):
    class Gone(Service):
        def key_value_set(self, key: str, value: str, allow_overwrite: bool) -> None:
            raise jax.errors.JaxRuntimeError("UNAVAILABLE: the service is gone")

    RollCall(Gone(), lambda: [Progress(1)], 0, 1.0, ()).run()
    assert "late hosts are not named from here on: UNAVAILABLE" in capfd.readouterr().err

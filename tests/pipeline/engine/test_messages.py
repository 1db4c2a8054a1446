"""What tasks of the cluster say reaches the process that started them."""

from __future__ import annotations

import threading

import pytest
import ray

from pipeline.engine.messages import listening

pytestmark = pytest.mark.usefixtures("local_ray")


def test_all_that_was_said_before_the_end_is_heard_in_order():
    heard = []

    @ray.remote(num_cpus=0)
    def say(news):
        for number in range(50):
            news.put(("step", number))

    with listening(lambda *news: heard.append(news)) as news:
        ray.get(say.remote(news))
    assert heard == [("step", number) for number in range(50)]


def test_nobody_listens_when_what_was_waited_for_fails():
    with pytest.raises(ValueError, match="the training"), listening(print):
        raise ValueError("the training")
    assert "news" not in {thread.name for thread in threading.enumerate()}

"""What tasks of the cluster say reaches the process that started them."""

from __future__ import annotations

import threading

import pytest
import ray

from pipeline.engine.messages import listening


def test_all_that_was_said_is_heard_in_order_also_before_a_failure(local_ray):
    heard = []

    @ray.remote(num_cpus=0)
    def say(news):
        for number in range(50):
            news.put(("step", number))

    with (
        pytest.raises(ValueError, match="the training"),
        listening(lambda *news: heard.append(news)) as news,
    ):
        ray.get(say.remote(news))
        raise ValueError("the training")
    assert heard == [("step", number) for number in range(50)]
    assert "news" not in {thread.name for thread in threading.enumerate()}

"""The jobs: one short program per verb, `python -m jobs.<verb>`.

A job reads its settings and checks its input before it imports Ray, torch, MLflow, transformers,
scikit-learn or matplotlib, which takes seconds: `run` imports the modules that need them. Settings lie in
modules that do not.

Ray reads these when it is imported, so they are set before any job imports it. Each is a default:
what the environment says wins.
"""

import os

_LOCAL_RAY = {
    # A Ray of our own listens on 127.0.0.1 only (without it, on every interface of the machine).
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    # It asks for a token, and clients send theirs only if told to. A cluster's own setting stands.
    "RAY_AUTH_MODE": "token",
    # The files of what its processes print are rotated at this size; else they grow until the disk is full.
    "RAY_ROTATION_MAX_BYTES": str(256 << 20),
    # Nobody announces that he takes this machine away; watching for it costs a process per training.
    "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0",
}
_EVERY_RAY = {
    # Its C++ code prints warnings of its own on the terminal: one for every pool of actors.
    "RAY_BACKEND_LOG_LEVEL": "fatal",
    "RAY_USAGE_STATS_ENABLED": "0",
    # 32 actors per read by default, which costs a small read 2 s; 2 read 1,000 footers a second.
    "RAY_DATA_PARQUET_FOOTER_NUM_ACTORS": "2",
    # The end of training is noticed after 0.5 s instead of 2 s.
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.5",
}
for _name, _value in {**_EVERY_RAY, **({} if "RAY_ADDRESS" in os.environ else _LOCAL_RAY)}.items():
    os.environ.setdefault(_name, _value)

"""Airflow 3: a run every night on a Ray cluster that is up. Copy it into the folder of DAGs.

Its worker needs this project's folder with its environment (`make .venv/installed`), and in its own
environment MLFLOW_TRACKING_URI and the cluster's RAY_API_SERVER_ADDRESS and RAY_AUTH_TOKEN.
"""

from datetime import UTC, datetime, timedelta

from airflow.providers.standard.operators.bash import BashOperator
from airflow.sdk import DAG

with DAG(
    dag_id="reembed-articles",
    schedule="0 3 * * *",
    start_date=datetime(2026, 1, 1, tzinfo=UTC),
    catchup=False,  # one run makes up for all that were missed
    max_active_runs=1,
    dagrun_timeout=timedelta(hours=12),
):
    BashOperator(
        task_id="embed_pool",
        cwd="/srv/polyrank",
        # The name says the run: another try follows a run that goes on, resumes one that failed, and sends
        # none twice that has succeeded: to send such a night again start a new run, as a cleared one does
        # nothing. A run that a person starts may have no logical date.
        bash_command=(
            ".venv/bin/python -m jobs.submit --wait"
            " --name reembed-articles-{{ dag_run.run_after | ts_nodash }}"
            " -- embed_pool --config jobs/schedules/reembed.yaml"
        ),
        append_env=True,
        retries=2,  # a run that failed resumes where it was
        retry_delay=timedelta(minutes=5),
    )

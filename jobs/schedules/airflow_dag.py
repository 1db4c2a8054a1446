"""Airflow 3: a run every night on a Ray cluster that is up. Copy it into the folder of DAGs.

Its worker needs `pip install "ray[default]"`, this project's folder, and in its environment the cluster's
RAY_API_SERVER_ADDRESS, RAY_AUTH_MODE=token and RAY_AUTH_TOKEN.
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
        # The id names the run and the try: the same one is never submitted twice.
        bash_command=(
            "ray job submit --submission-id reembed-articles-{{ ts_nodash }}-{{ ti.try_number }}"
            " --working-dir . -- python -m jobs.embed_pool --config jobs/schedules/reembed.yaml"
        ),
        append_env=True,
        retries=2,  # a run that failed resumes where it was
        retry_delay=timedelta(minutes=5),
    )

#!/bin/bash
# Starts a command; or an executor, if Spark on Kubernetes has started this container. Spark gives the settings of an
# executor as variables: SPARK_EXECUTOR_…, SPARK_DRIVER_URL, SPARK_APPLICATION_ID, and SPARK_JAVA_OPT_0 and so on.
set -euo pipefail

if [ "${1:-}" != executor ]; then
    exec tini -s -- "$@"
fi

mapfile -t options < <(env | grep '^SPARK_JAVA_OPT_' | sort --field-separator _ --key 4 --numeric-sort | cut -d = -f 2-)
exec tini -s -- "$JAVA_HOME/bin/java" \
    "${options[@]}" \
    "-Xms$SPARK_EXECUTOR_MEMORY" \
    "-Xmx$SPARK_EXECUTOR_MEMORY" \
    -cp "${SPARK_CONF_DIR:-$SPARK_HOME/conf}:$SPARK_HOME/jars/*:$PWD" \
    org.apache.spark.scheduler.cluster.k8s.KubernetesExecutorBackend \
    --driver-url "$SPARK_DRIVER_URL" \
    --executor-id "$SPARK_EXECUTOR_ID" \
    --cores "$SPARK_EXECUTOR_CORES" \
    --app-id "$SPARK_APPLICATION_ID" \
    --hostname "$SPARK_EXECUTOR_POD_IP" \
    --resourceProfileId "$SPARK_RESOURCE_PROFILE_ID" \
    --podName "$SPARK_EXECUTOR_POD_NAME"

"""The events of the operator's log; docs/reference/log-events.md is generated from them."""

from __future__ import annotations

from penstock.logs import LogEvent

LOG_EVENTS = (
    # The process.
    LogEvent("HealthServed", "info", "The operator has started; `/healthz`, `/readyz` and `/metrics` answer."),
    LogEvent(
        "FirstListsPending",
        "warning",
        "The API server has not answered the first list of some kinds; the operator waits for it.",
        "Apply the CRDs in `crds/`, and compare the ClusterRole and the Roles with the chart of this version.",
    ),
    LogEvent("OperatorStopping", "info", "The operator got SIGTERM or SIGINT and ends."),
    LogEvent(
        "TaskEnded",
        "error",
        "A part of the operator ended without an error; the process ends, and the kubelet restarts it.",
        "Nothing if the lines before it are about a lost lease; otherwise report it as a defect.",
    ),
    LogEvent(
        "TaskFailed",
        "error",
        "A part of the operator failed; the process ends, and the kubelet restarts it.",
        "If it repeats, read the message: an error of the API server is to be corrected there, a traceback is a "
        "defect to report.",
    ),
    LogEvent(
        "TaskRestarted",
        "error",
        "A part of the operator failed because of a defect and starts again after a growing delay; the others go on.",
        "Report it with the traceback.",
    ),
    LogEvent(
        "TaskNotEnded",
        "warning",
        "A part of the operator did not end in time after a signal, and is abandoned; it cannot write any more.",
    ),
    # Canaries.
    LogEvent(
        "CanaryJudged",
        "info",
        "A look at the canary of an endpoint (`object`): it continues (`Continue`), has passed or is rejected.",
    ),
    LogEvent(
        "CanaryDefect",
        "error",
        "Judging a canary failed because of a defect; the operator tries again, and the canary goes on meanwhile.",
        "Report it with the traceback.",
    ),
    # The lease.
    LogEvent("StandingBy", "info", "Another replica leads; this one waits for the lease."),
    LogEvent("LeaseAcquired", "info", "This replica holds the lease and leads."),
    LogEvent(
        "LeaseUnavailable",
        "warning",
        "The lease could not be read or renewed; the next attempt follows within seconds.",
        "If it repeats, check that the API server answers and that the operator may update Leases in its namespace.",
    ),
    LogEvent(
        "LeaseLost",
        "error",
        "This replica does not hold the lease any more and ends; another one leads (`Taken`), or will (`NotRenewed`).",
        "If it repeats, look at the latency of the API server and at the CPU throttling of the operator's pod.",
    ),
    LogEvent(
        "LeaseNotReleased",
        "warning",
        "The lease could not be handed over at the end, so the next replica leads only after the lease has expired.",
    ),
    LogEvent(
        "EventLoopBlocked",
        "error",
        "The operator did not react for longer than `--silence-limit-seconds`; it releases the lease and ends.",
        "Give the pod more CPU; if it repeats without throttling, report it as a defect.",
    ),
    # The watches.
    LogEvent("WatchExpired", "info", "The API server no longer has the history that a watch needs; it lists again."),
    LogEvent(
        "WatchInterrupted",
        "warning",
        "A watch failed once or a few times in a row; it is tried again.",
        "Nothing, unless `WatchFailed` follows.",
    ),
    LogEvent(
        "WatchFailed",
        "error",
        "A watch fails again and again, may not read the kind (`Forbidden`), or the kind does not exist (`NotFound`).",
        "`Forbidden`: correct the RBAC rules; `NotFound`: apply the CRDs; otherwise check the API server.",
    ),
    LogEvent(
        "KindNotServed",
        "warning",
        "The API server does not serve a kind that is optional, such as KEDA's ScaledObject.",
        "Install KEDA if endpoints use `scaling.mode: KEDA`; otherwise nothing.",
    ),
    LogEvent(
        "ObjectSkipped",
        "error",
        "An object of a watch could not be read; the operator goes on with what it knew of the object before.",
        "Report it with the traceback and the object.",
    ),
    LogEvent(
        "EventsMissed",
        "warning",
        "A resync found objects that differ from the watch, and corrected them.",
        "If it repeats, look for a proxy or load balancer that cuts long connections to the API server.",
    ),
    LogEvent(
        "ResyncFailed",
        "warning",
        "The periodic list of Penstock's own kinds failed; the watches continue.",
        "If it repeats, check that the API server answers.",
    ),
    LogEvent(
        "PodReadDefect",
        "error",
        "A read of a pod failed because of a defect of the operator; it counts as a failed read, and is tried again.",
        "Report it with the traceback, and what the pod answers to `/info`.",
    ),
    LogEvent(
        "JobProgressUnreadable",
        "warning",
        "The progress of a job cannot be read from its pod: the endpoint shows none, and has no fp32 plan to serve "
        "with until the job has ended. The result is not affected.",
        "Allow connections from the operator's namespace to port 8081 of the pods of jobs: another NetworkPolicy "
        "or a service mesh may refuse them.",
    ),
    # Reconciles.
    LogEvent("ControllerStarted", "info", "The caches are filled, and the leader reconciles all ModelEndpoints."),
    LogEvent(
        "ReconcileFailed",
        "warning",
        "A reconcile failed because of the cluster, and is tried again with growing delays.",
        "If it repeats for one endpoint, follow the remedy in the message and in its condition Ready.",
    ),
    LogEvent(
        "ReconcileDefect",
        "error",
        "A reconcile failed because of a defect of the operator, and is tried again; other endpoints are not affected.",
        "Report it with the traceback and the ModelEndpoint.",
    ),
    LogEvent(
        "EventNotPosted",
        "warning",
        "The API server refused an Event about an endpoint; the status has the same information.",
        "`Forbidden`: allow the operator to create Events; otherwise nothing, as in a namespace that is being deleted.",
    ),
    LogEvent("OptimizedModelDeleted", "info", "An OptimizedModel that no endpoint uses was deleted after its time."),
    # The artefact store.
    LogEvent("CollectionStarted", "info", "A job deletes unused artefacts from the store."),
    LogEvent(
        "CollectionNotStarted",
        "warning",
        "The job that deletes unused artefacts could not be created; it is tried again.",
        "Correct what the message names, such as a quota or an admission policy of the namespace.",
    ),
    LogEvent(
        "CollectionFailed",
        "warning",
        "The job that deletes unused artefacts failed; the store keeps them until the next period.",
        "Read the log of the job with the command in the message; check the store's credentials.",
    ),
    # Scaling.
    LogEvent(
        "ReplicasChanged", "info", "The autoscaler wants another number of replicas; the message has the figures."
    ),
    LogEvent(
        "PrometheusFailed",
        "warning",
        "A query to a Prometheus failed; the message has the details, which the endpoint's condition leaves out.",
        "Check the URL, the credentials and network policies; `is not allowed`: an endpoint names a host that resolves "
        "to an address of the node or of the cloud's metadata service.",
    ),
    LogEvent(
        "ScalingDefect",
        "error",
        "A scaling decision failed because of a defect of the operator; the endpoint keeps its replicas.",
        "Report it with the traceback and the ModelEndpoint.",
    ),
)

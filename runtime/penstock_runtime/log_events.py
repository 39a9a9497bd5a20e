"""The events of the logs of servers, serving pods and optimisation jobs; docs/reference/log-events.md is generated from
them."""

from __future__ import annotations

from penstock.logs import LogEvent

SERVER_EVENTS = (
    LogEvent("ServerListening", "info", "The server accepts connections; `/readyz` shows when it is ready."),
    LogEvent("InternalPortListening", "info", "The server accepts connections for probes and monitoring."),
    LogEvent("GrpcPortListening", "info", "The server accepts calls over gRPC (`--grpc-port`)."),
    LogEvent("ServerReady", "info", "The model is loaded, and requests are answered."),
    LogEvent("TokensChanged", "info", "Files of bearer tokens changed and were read again; `object` has the names."),
    LogEvent(
        "TokensUnreadable",
        "warning",
        "Changed files of bearer tokens cannot be read: those read before stay accepted. Look at the mounted Secret.",
    ),
    LogEvent(
        "NoTokens", "warning", "The folder of bearer tokens is empty: requests get 401. Put a key into the Secret."
    ),
    LogEvent(
        "CertificateChanged", "info", "The certificate's files changed: new connections get the new one (`object`)."
    ),
    LogEvent(
        "CertificateUnusable",
        "warning",
        "The changed certificate or key cannot be read, or they do not belong together; the one before stays in use.",
        "If it repeats, compare the two files: `openssl x509 -noout -pubkey` and `openssl pkey -pubout`.",
    ),
    LogEvent(
        "TokenInArguments",
        "warning",
        "`--auth-token` was given: every user of the machine can read it. Use PENSTOCK_AUTH_TOKEN or a file.",
    ),
    LogEvent("ServerDraining", "info", "The server got a signal and finishes the requests that it has accepted."),
    LogEvent("ServerDrained", "info", "The server answered its last request and ends."),
    LogEvent("SecondSignal", "warning", "A second signal came while the server drained; it ends without finishing."),
    LogEvent(
        "ConnectionsCutOff",
        "warning",
        "Requests were still running at the end of the drain limit, and their connections were closed.",
        "If it repeats with every rollout, raise `--drain-limit-seconds`, or look for requests that take too long.",
    ),
    LogEvent(
        "ModelStillRunning",
        "warning",
        "The model was still computing at the end of the drain limit; the process ends anyway.",
        "As for `ConnectionsCutOff`.",
    ),
    LogEvent(
        "ConnectionLimitLowered",
        "warning",
        "The process may not open enough files for `--max-connections`, so it accepts fewer connections.",
        "Raise the limit of open files (`ulimit -n`), or lower `--max-connections`.",
    ),
    LogEvent(
        "CoreFinding",
        "info",
        "A fact about the CPUs of the process that affects latency, such as CPUs that it shares with others.",
        "On a cluster, see the condition CoresPinned of the endpoint; otherwise follow the message.",
    ),
    LogEvent("NeuronShapeLoaded", "info", "A compiled shape was loaded onto NeuronCores; the number of loads so far."),
    LogEvent(
        "NeuronCoresTaken",
        "warning",
        "Another process has the NeuronCores, often one that is just ending; the start is tried again for a minute.",
        "If it repeats, look for the process that has them: `neuron-ls` on the node.",
    ),
    LogEvent(
        "NeuronRuntimeMessage",
        "warning",
        "An error line of the Neuron runtime in the process that owns the device.",
        "Look it up in the troubleshooting guide of the Neuron runtime, if an error of the server follows.",
    ),
    LogEvent(
        "CapacityMeasured",
        "info",
        "Before it is ready, the pod has measured what a replica takes: the operator scales by that.",
    ),
    LogEvent(
        "CapacityUnmeasured",
        "warning",
        "The pod is ready without having measured its capacity: the operator scales by published figures.",
        "Delete the pod, which measures it again at its next start; `reason` has the cause.",
    ),
    LogEvent(
        "NeuronCoreFailed",
        "error",
        "A NeuronCore failed and gets no more runs; the server goes on with the others. `object` names the copies of "
        "the model.",
        "Look at the node's condition NeuronHealth and the message; delete the pod to start on all cores again.",
    ),
    LogEvent(
        "ServerFailed",
        "error",
        "The device of the model has failed: the server is no longer ready, drains and ends with exit code 75.",
        "Nothing if the next start serves; otherwise drain and replace the node.",
    ),
    LogEvent(
        "BatchFailed",
        "warning",
        "A batch failed; its rows run again one by one, so that only the row that causes the failure fails.",
        "Nothing, unless `RowFailed` follows; if it repeats with `MemoryError`, give the pods more memory.",
    ),
    LogEvent(
        "ShadowFailed",
        "warning",
        "The guard of live traffic could not compare an answer with fp32's; only the first such failure is logged.",
        "Nothing, if `penstock_shadow_lost_total` with the reason `failed` stays low; otherwise give the pods memory.",
    ),
    LogEvent(
        "RowFailed",
        "error",
        "The engine failed on one input, or its output cannot be used; the request was answered with 500.",
        "`MemoryError`: give the pods more memory; otherwise report it with the traceback and the model.",
    ),
    LogEvent(
        "RequestFailed",
        "error",
        "A request was answered with 500 for a reason that the server knows; the object is the request id.",
        "Follow the message; `RowFailed` before it has the cause if the engine failed.",
    ),
    LogEvent(
        "GenerationFailed",
        "error",
        "A step of the engine of text generation failed; the requests that took part were answered with 500.",
        "Look at the reason. Restart the pod if it repeats; report it with the traceback.",
    ),
    LogEvent(
        "UnknownField",
        "info",
        "Requests of a client have a field that is not used, logged once for each name; it may be a misspelt one.",
        "Look whether the client means the field that the line names.",
    ),
    LogEvent(
        "LogitsNotFinite",
        "error",
        "The model gave NaN or infinity for a token; its request was answered with 500.",
        "Look for such values in the weights, or choose another precision.",
    ),
    LogEvent(
        "SamplingFailed",
        "error",
        "A token could not be chosen or has no text, for example because the grammar of the request became too "
        "complex; the request was answered with 500.",
        "Look at the reason; report it with the traceback if it is no grammar.",
    ),
    LogEvent(
        "StreamDefect",
        "error",
        "A response was cut off while it was streamed, because of a defect of the server.",
        "Report it with the traceback.",
    ),
    LogEvent(
        "RequestDefect",
        "error",
        "A request was answered with 500 because of a defect of the server; the object is the request id.",
        "Report it with the traceback.",
    ),
)
"""Of a serving pod and of `penstock serve`."""

POD_EVENTS = (
    LogEvent("FetchProgressed", "info", "The progress of fetching the artefact from the store."),
    LogEvent(
        "FetchRetried",
        "warning",
        "The artefact store did not deliver; the pod tries again, for about a minute in all.",
        "If it repeats, check the store and the network between the store and the node.",
    ),
    LogEvent("CoresChosen", "info", "The CPUs that the pod computes on, and whether it has them exclusively."),
    LogEvent(
        "OtherInstructionSet",
        "warning",
        "The processor is of another kind than the one that the artefact was measured and judged on.",
        "Narrow the hardware class to nodes of one kind; nothing if the message is about the fp32 graph.",
    ),
    LogEvent(
        "ModelFinding",
        "warning",
        "A fact about the model or its artefact that affects its answers or its speed.",
        "Follow the message.",
    ),
    LogEvent("ModelServed", "info", "The pod serves the plan that the message names."),
    LogEvent(
        "ServerCrashed",
        "error",
        "A signal ended the server, and the pod's first process starts it again: a crash in a library, or too little "
        "memory (SIGKILL).",
        "After SIGKILL raise the pod's memory; otherwise report it with the lines before it.",
    ),
    LogEvent(
        "PodFailed",
        "error",
        "The pod cannot serve and ends; the message has the cause and the remedy, as its termination message has.",
        "Follow the remedy; errors that may pass (exit code 75) need nothing unless they repeat.",
    ),
    LogEvent(
        "PodDefect",
        "error",
        "The pod ends because of a defect.",
        "Report it with the traceback; until it is corrected, pin the previous artefact in the spec.",
    ),
)
"""Of a serving pod."""

JOB_EVENTS = (
    LogEvent(
        "ArtefactDamaged",
        "warning",
        "A finished artefact on the disk is altered or incomplete; it is made again.",
        "If it repeats, check the disk of the node, and what else writes to the folder.",
    ),
    LogEvent(
        "OptimizationFailed",
        "error",
        "The optimisation failed; the endpoint's condition Optimized has the same reason and remedy.",
        "Follow the remedy; errors that may pass (exit code 75) are tried again without action.",
    ),
    LogEvent(
        "OptimizationDefect",
        "error",
        "The optimisation failed because of a defect; what serves is not affected.",
        "Report it with the traceback and the spec.",
    ),
)
"""Of an optimisation job, and of `penstock optimize` and `penstock serve`."""

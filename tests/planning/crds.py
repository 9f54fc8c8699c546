"""What the API servers of two custom resources accept, as far as exported files use it: extracts that allow nothing else.

Written by hand from the published definitions; the whole of these accepts the golden files too.

- MPIJob: kubeflow/mpi-operator, manifests/base/kubeflow.org_mpijobs.yaml, version v2beta1, and pkg/apis/kubeflow/v2beta1/types.go
- JobSet: kubernetes-sigs/jobset, config/components/crd/bases/jobset.x-k8s.io_jobsets.yaml, version v1alpha2
- Pods, Jobs and ConfigMaps: the core and batch API of Kubernetes, as these two include it
"""

TEXT = {"type": "string"}
WHOLE = {"type": "integer", "minimum": 0}


def only(required=(), **properties):
    """An object that may have these keys and no other."""
    return {"type": "object", "properties": properties, "required": list(required), "additionalProperties": False}


def list_of(one):
    return {"type": "array", "items": one}


KEY_TO_PATH = only(("key", "path"), key=TEXT, path=TEXT, mode=WHOLE)
VOLUME = only(
    ("name",),
    name=TEXT,
    configMap=only(name=TEXT, defaultMode=WHOLE, items=list_of(KEY_TO_PATH)),
    secret=only(secretName=TEXT, defaultMode=WHOLE, items=list_of(KEY_TO_PATH)),
    emptyDir=only(medium={"enum": ["", "Memory"]}, sizeLimit=TEXT),
)
VARIABLE = only(("name",), name=TEXT, value=TEXT, valueFrom=only(secretKeyRef=only(("key",), name=TEXT, key=TEXT)))
CONTAINER = only(
    ("name",),
    name=TEXT,
    image=TEXT,
    command=list_of(TEXT),
    args=list_of(TEXT),
    env=list_of(VARIABLE),
    readinessProbe=only(tcpSocket=only(("port",), port={"type": ["integer", "string"]}), periodSeconds=WHOLE),
    volumeMounts=list_of(only(("name", "mountPath"), name=TEXT, mountPath=TEXT)),
    resources=only(limits={"type": "object", "additionalProperties": TEXT}),
)
POD = only(
    ("containers",),
    containers=list_of(CONTAINER),
    volumes=list_of(VOLUME),
    restartPolicy={"enum": ["Always", "OnFailure", "Never"]},
    terminationGracePeriodSeconds=WHOLE,
)
NAMED = only(("name",), name=TEXT)
JOB = only(
    ("template",),
    parallelism=WHOLE,
    completions=WHOLE,
    completionMode={"enum": ["Indexed", "NonIndexed"]},
    backoffLimit=WHOLE,
    template=only(spec=POD),
)
REPLICA = only(replicas=WHOLE, restartPolicy={"enum": ["Never", "OnFailure"]}, template=only(spec=POD))
MPIJOB = only(
    ("apiVersion", "kind", "metadata", "spec"),
    apiVersion={"const": "kubeflow.org/v2beta1"},
    kind={"const": "MPIJob"},
    metadata=NAMED,
    spec=only(
        ("mpiReplicaSpecs",),
        slotsPerWorker=WHOLE,
        sshAuthMountPath=TEXT,
        launcherCreationPolicy={"enum": ["AtStartup", "WaitForWorkersReady"]},
        runPolicy=only(cleanPodPolicy={"enum": ["All", "Running", "None"]}, backoffLimit=WHOLE),
        mpiReplicaSpecs=only(("Launcher", "Worker"), Launcher=REPLICA, Worker=REPLICA),
    ),
)
JOBSET = only(
    ("apiVersion", "kind", "metadata", "spec"),
    apiVersion={"const": "jobset.x-k8s.io/v1alpha2"},
    kind={"const": "JobSet"},
    metadata=NAMED,
    spec=only(
        network=only(enableDNSHostnames={"type": "boolean"}, subdomain=TEXT),
        successPolicy=only(("operator",), operator={"enum": ["All", "Any"]}, targetReplicatedJobs=list_of(TEXT)),
        failurePolicy=only(maxRestarts=WHOLE),
        replicatedJobs=list_of(
            only(
                ("name", "template"),
                name=TEXT,
                replicas=WHOLE,
                template=only(spec=JOB),
                dependsOn=list_of(only(("name", "status"), name=TEXT, status={"enum": ["Ready", "Complete"]})),
            )
        ),
    ),
)
CONFIG_MAP = only(
    ("apiVersion", "kind", "metadata"),
    apiVersion={"const": "v1"},
    kind={"const": "ConfigMap"},
    metadata=NAMED,
    data={"type": "object", "additionalProperties": TEXT},
)
BY_KIND = {"MPIJob": MPIJOB, "JobSet": JOBSET, "ConfigMap": CONFIG_MAP}

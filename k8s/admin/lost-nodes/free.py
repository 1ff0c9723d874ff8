"""Deletes by force pods of Ray that should have ended MINUTES ago: their node does not answer, and
KubeRay replaces them only when they are gone. A worker that is only cut off stops by itself."""

import datetime
import json
import os
import ssl
import time
import urllib.request

ACCOUNT = "/var/run/secrets/kubernetes.io/serviceaccount/"
PODS = f"https://kubernetes.default.svc/api/v1/namespaces/{open(ACCOUNT + 'namespace').read()}/pods"


def ask(method, url, body=None):
    token = open(ACCOUNT + "token").read()  # it is replaced now and then
    headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
    request = urllib.request.Request(url, body, headers, method=method)
    context = ssl.create_default_context(cafile=ACCOUNT + "ca.crt")
    with urllib.request.urlopen(request, context=context, timeout=10) as answer:
        return json.load(answer)


while True:
    try:
        late = datetime.timedelta(minutes=float(os.environ["MINUTES"]))
        before = (datetime.datetime.now(datetime.UTC) - late).strftime("%Y-%m-%dT%H:%M:%SZ")
        for pod in ask("GET", f"{PODS}?labelSelector=ray.io/node-type")["items"]:
            if pod["metadata"].get("deletionTimestamp", "9999") < before:
                print(f"{pod['metadata']['name']} is on {pod['spec']['nodeName']}", flush=True)
                ask("DELETE", f"{PODS}/{pod['metadata']['name']}", b'{"gracePeriodSeconds": 0}')
    except OSError as error:
        print(f"the Kubernetes API: {error}", flush=True)
    time.sleep(10)

"""The service: a FastAPI application on Ray Serve.

A request passes `http` (guard, then a route of api or wire), `service` (what one request needs) and
`batcher` (the thread that computes for all), which runs the stages of an `engine` (a model with its pools).

app, replica              what Serve deploys; `limits` and `metrics` of it
http, playground          the interface, and the page at /
service, batcher, demand  requests, their batches, and the sender that asks for most
engine, pools, intents    the work; `known_contexts` of candidates
shards                    pools in deployments of their own
versions, follower        new models and pools: which, and the swap in each replica
refusals, answers         what a client can be told; `client` asks in Python
tracing                   OpenTelemetry
"""

"""The HTTP side: messages and connections below, routes and the shapes of several APIs above.

message      requests and responses as values
connection   HTTP/1.1 on one socket: parsing, limits, timeouts, order of answers
acceptor     all connections: accepting, sweeping, draining
routes       which handler for which method and path
application  from request to response: refusals, errors, metrics
service      what handlers may do: predict, and say what is served
predict tei cohere openai v2 ...   one module per API
"""

"""One push of weights: the transports, the requests to servers, and the report."""

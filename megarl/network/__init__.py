"""Tokens, sockets, certificates, and the limits of HTTP on both sides."""

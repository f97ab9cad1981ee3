"""Files that survive a crash, sockets with certificates and tokens, HTTP with limits on both sides, text."""
